#!/bin/sh
# cli.sh - tests ./train and ./run from outside, as a user meets them:
#     sh tests/cli.sh [FOLDER OF THE PROGRAMS]
# POSIX sh, no Python. Works in a folder of its own, prints a line per failed check and a summary,
# exits 1 if one failed. Every run is searched for sanitizer reports too, so it is worth a run on a
# build with sanitizers.

root=$(cd "$(dirname "$0")/.." && pwd)
bin=$(cd "${1:-${BINDIR:-$root}}" && pwd) || exit 1
[ -x "$bin/train" ] && [ -x "$bin/run" ] || { echo "cli: no train and run in $bin" >&2; exit 1; }
limit=; command -v timeout >/dev/null && limit="timeout 30"
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM HUP
cd "$tmp" || exit 1
exec </dev/null
export LC_ALL=C LANG=C
passed=0 failed=0

# ---- Helpers: go runs a program and leaves `out`, `err` and rc; the others judge what it left ----

TINY="-q --tokenizer bytes --dim 16 --heads 2 --layers 1 --ctx 16 --batch 2 --seed 1 --threads 1"
go() {
    ran=$* program=$1
    shift
    $limit "$bin/$program" "$@" >out 2>err
    rc=$?
    grep -Eq 'runtime error|Sanitizer' err && bad "no sanitizer report"
}
train() { go train $TINY "$@"; }    # an option that is given again replaces the tiny one
loud() { go train ${TINY#-q} "$@"; }
run() { go run -q --threads 1 "$@"; }
resume() { go train -q --threads 1 --resume "$@"; }
show() { head -c 200 "$1" | tr '\n' '|' | tr -c '[:print:]' '?'; }
bad() {
    failed=$((failed + 1))
    printf 'FAILED %.170s: expected %s; got exit %s, stdout "%.80s", stderr "%s"\n' \
        "$(printf %s "$ran" | tr '\n' '|')" "$1" "$rc" "$(show out)" "$(show err)"
}
ok() {        # ok WHAT TEST...        the test succeeds
    what=$1; shift
    if "$@"; then passed=$((passed + 1)); else bad "$what"; fi
}
lines() { [ "$(wc -l <err)" -eq "$1" ]; }
refused() { [ "$rc" -eq "$1" ] && [ ! -s out ] && lines 1 && grep -Eq -e "$2" err; }
accepted() {
    [ "$rc" -eq 0 ] && { [ $program = run ] || [ ! -s out ]; } &&
        { [ -z "$1" ] || cat out err | grep -Eq -e "$1"; }
}
silent() { [ "$rc" -eq 0 ] && [ ! -s out ] && [ ! -s err ]; }
printed() { [ "$rc" -eq 0 ] && printf '%s\n' "$1" | cmp -s - out && lines 0; }
fails() {     # fails CODE RE COMMAND...   exit CODE, empty stdout, one line on stderr that matches
    code=$1 re=$2; shift 2
    "$@"
    ok "exit $code and one line with /$re/" refused "$code" "$re"
}
works() {     # works RE COMMAND...        exit 0, the output matches; train leaves stdout empty
    re=$1; shift
    "$@"
    ok "exit 0 and /$re/" accepted "$re"
}
prints() {    # prints TEXT COMMAND...     exit 0, stdout is TEXT and a newline, stderr is empty
    text=$1; shift
    "$@"
    ok "exit 0 and \"$text\"" printed "$text"
}
same() { ok "${3:-$1 and $2 with the same bytes}" cmp -s "$1" "$2"; }
gone() { for file; do ok "no file $file" [ ! -e "$file" ]; done; }
table() { ok "$1" awk -F '\t' "$3" "$2"; }    # table WHAT FILE PROGRAM: awk exits with 0
losses() { cut -f 1-3,5,6 "$1"; }    # a log's columns that depend on neither time nor evaluations
# parameters and moments of a model file: all but header, vocabulary and the numbers of the state
arenas() {
    v=$(od -An -tu8 -j320 -N8 "$1") n=$(od -An -tu8 -j328 -N8 "$1")
    tail -c +$((385 + (v + 63) / 64 * 64)) "$1" | head -c $((4 * n))
    tail -c $((8 * n)) "$1"
}
# an entry of a tokenizer.bin: score 0, length, bytes
entry() { printf "\\000\\000\\000\\000\\00${#1}\\000\\000\\000%s" "$1"; }

letters=abcdefghijklmnopqrstuvwxyz
# what follows a letter is learned at once
i=0; while [ $i -lt 40 ]; do echo $letters; i=$((i + 1)); done >abc.txt
{ cat abc.txt; echo more; } >other.txt
printf 'a text that is not a model but long enough to hold a header' >foreign
hex='0 1 2 3 4 5 6 7 8 9 A B C D E F'
# a vocabulary of 259 without a blank
{ printf '\006\000\000\000'; for s in '<unk>' '<s>' '</s>'; do entry "$s"; done
  for a in $hex; do for b in $hex; do entry "<0x$a$b>"; done; done; } >bytes.tok
: >empty; printf a >one

# ---- Help and misuse -----------------------------------------------------------------------------

fails 2 '--pos nope is not an encoding; there are none sinusoidal learned rpe t5 alibi rope' \
    train --pos nope abc.txt
encodings=$(sed 's/.*there are //' err)
for p in train run; do
    go $p --help
    ok "exit 0, nothing on stderr" eval '[ $rc -eq 0 ] && lines 0'
    ok "a line of usage" grep -q "^usage: $p" out
    for o in dim layers heads batch accum steps lr weight-decay clip val-frac threads \
             tokens temp top-k top-p; do
        ! grep -Eq -e "--$o [NX] " out ||
            ok "a default of --$o" grep -Eq -e "--$o [NX] .*\[[-+.e0-9]+\]$" out
    done
done
go train --help
for e in $encodings; do ok "$e in it" grep -q "^  $e  " out; done
ok "defaults of all options of encodings" \
    [ "$(grep -c '^      --' out)" -eq "$(grep -c '^      --.*\[[-+.e0-9a-z]*\]$' out)" ]
ok "the words of an option" \
    grep -q '^      --rope-scaling .*: none linear ntk dynamic yarn llama3 \[none\]$' out
go run --help
ok "the same, and no option that decides the parameters" \
    eval 'grep -q "^      --rope-scaling .*none linear" out && ! grep -q -e --rpe-clip out'

fails 2 'no text file'                        train
fails 2 'no model'                            run
fails 2 'a\.bin and b\.bin'                   run a.bin b.bin
fails 2 '^train: unknown option --bogus'      train --bogus 3 abc.txt
fails 2 '^run: unknown option -x'             run -x m.bin
fails 2 'unknown option -n5'                  run -n5 m.bin
fails 2 'unknown option --step'               train --step 5 abc.txt
fails 2 '--quiet takes no value'              train --quiet=1 abc.txt
fails 2 '--steps needs a value'               train abc.txt --steps
fails 2 '-n needs a value'                    run m.bin -n
fails 2 '--stop can be given 8 times'         run m.bin --stop 1 --stop 2 --stop 3 --stop 4 \
                                              --stop 5 --stop 6 --stop 7 --stop 8 --stop 9
for x in 5x x '' 1.5 '5 ' 0x10; do
    fails 2 '--steps: ".*" is not a whole'    train --steps "$x" abc.txt
done
fails 2 '--lr: "1e-3x" is not a number'       train --lr 1e-3x abc.txt
for x in '--lr nan' '--lr inf' '--dim 0' '--ctx 99999999999' '--val-frac 1' '--threads -1'; do
    fails 2 "${x% *}: ${x#* } is not between" train $x abc.txt
done
for x in '-n -1' '-n 99999999999' '-k -3' '-t nan' '-t -1' '-t inf' '--top-p 1.1'; do
    fails 2 "${x% *}: ${x#* } is not between" run $x m.bin
done
fails 2 '-t: "x" is not a number'             run -t x m.bin
fails 2 '--seed: "-1" is not'                 train --seed -1 abc.txt
fails 2 '--seed: "18446744073709551616" is'   run --seed 18446744073709551616 m.bin
for x in 0 x '' '8,' 8,,9; do
    fails 2 '--ctx: '                         run --ctx "$x" m.bin
done
fails 2 '--ctx takes one number'              run --ctx 8,9 m.bin
fails 2 '--by-position needs --eval'          run --by-position m.bin
fails 2 '--prompt and --prompt-file'          run -p a -f b m.bin
fails 2 '--resume and --init'                 train --resume a --init b abc.txt
fails 2 '--val and --val-frac'                train --val abc.txt --val-frac 0.2 abc.txt
fails 2 '--stride needs --eval'               run --stride 4 m.bin
fails 2 '--answers needs --eval'              run --answers = m.bin
fails 2 'excludes --by-position, --stride'    run --answers = --eval a --stride 2 m.bin
fails 2 'and --first-position'                run --answers = --eval a --first-position 1 m.bin
fails 2 '--ctx takes one number'              run --answers = --eval a --ctx 8,9 m.bin
fails 2 '--eval and --inspect'                run --eval a --inspect b m.bin
fails 2 '--inspect excludes'                  run --inspect a -p b m.bin
fails 2 'unknown option --rpe-clip'           run --rpe-clip 4 m.bin
fails 2 '--t5-max is not .* encoding rope'    train --pos rope --t5-max 9 abc.txt
fails 2 '--rope-base is not .* encoding none' train --pos NONE --rope-base 9 abc.txt
fails 2 'ing: "pi" is not one of none linear ntk dynamic yarn llama3$' \
    train --rope-scaling pi abc.txt
fails 2 'rope-high 1 must exceed rope-low 1'  train --rope-high 1 abc.txt
fails 2 'rope-dims: 1\.5 is not'            train --rope-dims 1.5 abc.txt
fails 2 '--rpe-clip: -1 is not between'       train --pos rpe --rpe-clip -1 abc.txt
fails 2 't5-max 4 .*t5-buckets 32'            train --pos t5 --t5-max 4 abc.txt
fails 2 'dim 16 .*heads 3'                    train --heads 3 abc.txt
fails 2 'heads 2 .*kv-heads 3'                train --kv-heads 3 abc.txt
fails 2 'rope .* odd .* 5$'                   train --dim 15 --heads 3 abc.txt
fails 2 'rope-dims 10 .* 8 '                  train --rope-dims 10 abc.txt
gone model.bin model.bin.tmp

# ---- Texts ---------------------------------------------------------------------------------------

train --steps 5 --log lf.tsv --out lf.bin abc.txt
ok "exit 0 and silence with -q" silent
sed 's/$/X/' abc.txt | tr X '\r' >crlf.txt; tr '\n' '\r' <abc.txt >cr.txt
{ printf '\357\273\277'; cat abc.txt; } >bom.txt
# the state in the file holds a checksum of the tokens, so the same model is the same tokens
for f in crlf cr bom; do
    works '' train --steps 5 --log $f.tsv --out $f.bin $f.txt
    same lf.bin $f.bin "the same model from $f.txt as from abc.txt"
    losses $f.tsv >a; losses lf.tsv >b; same a b "the same losses"
done
works 'cr.txt: 40 carriage returns' loud --steps 0 cr.txt
head -c 400 abc.txt >a; tail -c +401 abc.txt >b
works '' train --steps 5 --out two.bin a b;   same lf.bin two.bin "two files to be one text"
mkfifo pipe; cat abc.txt >pipe &
works '' train --steps 5 --out in.bin - <pipe
same lf.bin in.bin "a text from standard input to be the same"
# A text takes its own size and two bytes a token, here 7.6 + 4 MiB, beside some 4 of the program;
# a sanitizer takes more. The size of what a pipe brings is not known before.
for i in 1 2 3 4 5 6 7 8; do cat "$root/tests/data/stories.txt"; done >big
lean() {
    mib=$(sed -n 's/.*peak memory \([0-9]*\) MiB.*/\1/p' err)
    [ "${mib:-0}" -ge 12 ] && { [ "$mib" -le 20 ] || grep -q __asan "$bin/train"; }
}
works '' loud --steps 0 --tokenizer "$root/tokenizer.bin" --out big.bin big
ok "a peak memory of 12 to 20 MiB" lean
cat big >pipe &
works '' loud --steps 0 --tokenizer "$root/tokenizer.bin" --out in.bin - <pipe
ok "a peak memory of 12 to 20 MiB" lean
same big.bin in.bin "a long text from a pipe to be the same"
rm -f big
printf '\377\376h\000i\000' >u16.txt
fails 1 'u16.txt: .*UTF-16'                   train u16.txt
fails 1 'no.txt: No such file'                train no.txt
fails 1 '\.: is a directory'                  train .
fails 1 'empty: .*empty'                      train empty
fails 1 'no.txt: No such file'                train --val no.txt abc.txt
fails 1 'no.tok: No such file'                train --tokenizer no.tok abc.txt
head -c 1000 "$root/tokenizer.bin" >cut.tok
fails 1 'cut.tok: not a tokenizer: .*cut off' train --tokenizer cut.tok abc.txt
head -c 17 abc.txt >n17; head -c 16 abc.txt >n16; head -c 22 abc.txt >n22
fails 1 'n16: 16 tokens .* 17 '               train --val-frac 0 n16
fails 1 'n17: 16 tokens .*validation.* 17 '   train n17
works '' train --steps 2 --val-frac 0 n17
works 'val n/a' loud --steps 1 --val one n22
rm -f model.bin

# ---- The model file: found unwritable before training, never half written, never another's -------

mkdir folder
fails 1 'no/m.bin'                            train --steps 1000000 --out no/m.bin abc.txt
fails 1 'abc.txt/m.bin'                       train --steps 1000000 --out abc.txt/m.bin abc.txt
fails 1 'folder: is a directory'              train --steps 1000000 --out folder abc.txt
fails 1 'no/l.tsv'                            train --steps 1000000 --log no/l.tsv abc.txt
train --steps 1 --out '' abc.txt
ok "--out '' refused, no file .tmp" eval '[ $rc -ne 0 ] && [ ! -e .tmp ]'; rm -f .tmp
train --steps 1 --out pipe abc.txt
ok "--out to be refused: not a file (as /dev/null)" eval '[ $rc -ne 0 ] && [ -p pipe ]'
cp abc.txt t; train --steps 1 --out t t
ok "--out to be refused where the text is" cmp -s abc.txt t
cp abc.txt t; train --steps 1 --log t --out m.bin t
ok "--log to be refused where the text is" cmp -s abc.txt t
rm -f m.bin t pipe
small_disk() {
    ran="$* with ulimit -f 10"
    (trap '' XFSZ; ulimit -f 10; train "$@"; exit "$rc"); rc=$?
}
fails 1 'disk.bin.*: File too large'          small_disk --steps 1 --out disk.bin abc.txt
gone model.bin model.bin.tmp disk.bin disk.bin.tmp no; rm -f disk.bin.tmp

# ---- Every encoding ------------------------------------------------------------------------------

for e in $encodings; do
    E=$(echo "$e" | tr '[:lower:]' '[:upper:]')
    works '' train --pos $e --steps 6 --log a.tsv --out $e.bin abc.txt
    works '' train --pos "$E" --steps 6 --stop-after 3 --log b.tsv --out half.bin abc.txt
    works '' resume half.bin --threads 3 --log b.tsv --out b.bin abc.txt
    same $e.bin b.bin "$e: the same file straight and resumed"
    losses a.tsv >a; losses b.tsv >b; same a b "$e: the same log straight and resumed"
    run $e.bin -p abc -n 12 -s 0
    ok "exit 0 and no messages with -q" eval '[ $rc -eq 0 ] && lines 0'; mv out a
    run $e.bin -p abc -n 12 -s 0;             same a out "seed 0 twice to give the same text"
    run $e.bin -p abc -n 12 -s 1; mv out a
    run $e.bin -p abc -n 12 -s 2;             ok "seeds 1 and 2 to differ" eval '! cmp -s a out'
    if [ $e = learned ]; then    # the one that is bounded
        fails 1 'learned .* 16 '              run $e.bin --ctx 17 -p abc
        fails 1 'learned .* 16 '              run $e.bin --ctx 8,17 --eval abc.txt
    else
        works '^abc'                          run $e.bin --ctx 48 -p abc -n 40
        works '^48'                           run $e.bin --ctx 16,48 --eval abc.txt
    fi
    works '' train --init lf.bin --pos $e --steps 2 --out b.bin abc.txt
done

# ---- Generation: a model that has learned the alphabet -------------------------------------------

works '' train --steps 150 --lr 1e-2 --ctx 32 --out m.bin abc.txt
prints abcdefghij                             run m.bin -p abc -n 7 -t 0
for more in '-t 0 -s 5' '-t 1e-8' '-t 1e-45' '-k 1' '-k 1 -t 5 -s 3' '--top-p 0' \
            '-t 0 --threads 2' '--temp=0' '-t 0 -z bytes'; do
    prints abcdefghij                         run m.bin -p abc -n 7 $more
done
run m.bin -p abc -n 20 -t 5 --top-p 1 -s 3; mv out a
run m.bin -p abc -n 20 -t 5 --top-p 1 -s 3 -k 0;  same a out "-k 0 to be off"
run m.bin -p abc -n 20 -t 5 --top-p 1 -s 4;   ok "another seed to differ" eval '! cmp -s a out'
works 'seed [0-9]+'                           go run m.bin -n 1
works 'seed [0-9]+' \
    go train --tokenizer bytes --dim 16 --heads 2 --steps 0 --out a abc.txt
prints abc                                    run m.bin -p abc -n 0
prints ''                                     run m.bin -n 0
prints abcde                                  run m.bin -n 5 -t 0
prints abcde                                  run m.bin -n 5 -t 0 -p ''
prints abcde                                  run m.bin -n 5 -t 0 -f empty
prints "$(printf 'xyz\nabc')"                 run m.bin -n 4 -t 0 -p xyz
works 'context of 32'                         go run m.bin -p abc -n 1000 -t 0
ok "two lines and the notice" lines 3
fails 1 'prompt has 33 .*context 32'          run m.bin -p "$letters 123456" -n 1
works "^$letters 12345"                       run m.bin -p "$letters 12345" -n 1
fails 1 'prompt has 100000 .*context 32' \
    run m.bin -p "$(head -c 100000 /dev/zero | tr '\000' a)"
prints abcde                                  run m.bin -p abc -n 9 -t 0 --stop fgh
prints abcd                                   run m.bin -p abc -n 9 -t 0 --stop fgh --stop e
prints abcd                                   run m.bin -p abc -n 9 -t 0 --stop deZ --stop e
prints abcdefghijkl                           run m.bin -p abc -n 9 -t 0 --stop abc --stop klmno
emoji=$(printf '\360\237\216\211\360\237\246\231 \303\266\377')
prints "$emoji"                               run m.bin -n 0 -p "$emoji"
printf 'abc\n' >a;      prints '97 98 99'     run m.bin --encode -f a
printf 'abc\n\n' >a;    prints '97 98 99 10'  run m.bin --encode -f a
printf 'abc\r\n' >a;    prints '97 98 99'     run m.bin --encode -f a
printf 'a\000b\n\n' >a; prints '97 0 98 10'   run m.bin --encode -f - <a
prints '97 98 99'                             go run m.bin --encode -p abc
run m.bin --encode -f abc.txt
ok "--encode without a limit: nothing is generated" [ "$(wc -w <out)" -eq 1079 ]

# ---- Model files and vocabularies ----------------------------------------------------------------

head -c 5000 m.bin >cut.bin; { cat m.bin; echo; } >long.bin; head -c 10 m.bin >ten.bin
{ head -c 2000 m.bin; printf XYZ; tail -c +2004 m.bin; } >flip.bin
for f in cut long; do
    sizes="$(wc -c <m.bin | tr -d ' ') bytes .* $(wc -c <$f.bin | tr -d ' ')"
    fails 1 "$f.bin: expected $sizes"         run $f.bin
done
fails 1 'flip.bin: .*damaged'                 run flip.bin
for f in ten.bin foreign empty; do fails 1 "$f: not a model" run $f; done
fails 1 'no.bin: No such file'                run no.bin
fails 1 '\.: is a directory'                  run .
fails 1 'no.txt: No such file'                run m.bin -f no.txt
fails 1 'foreign: not a model'                train --init foreign abc.txt
fails 1 'cut.bin: expected'                   resume cut.bin abc.txt
fails 1 '256 .*bytes.tok .*259'               run m.bin -z bytes.tok
fails 1 '256 .*bytes.tok .*259'               train --init m.bin --tokenizer bytes.tok abc.txt
fails 1 'cut.tok: not a tokenizer'            run m.bin -z cut.tok
works '' train --steps 2 --tokenizer bytes.tok --out v.bin abc.txt
prints ' abc'                                 run v.bin -n 0 -p ' abc'
# the blank that encode puts in front is not printed
prints 'abc'                                  run v.bin -n 0 -p abc
prints '35 100 101'                           run v.bin --encode -p ab
works '' train --steps 2 --tokenizer "$root/tokenizer.bin" --out v.bin abc.txt
for x in 'the cat' ' the  cat ' "$emoji" '<s></s><0x41>'; do
    prints "$x"                               run v.bin -n 0 -p "$x"
done

# ---- Evaluation ----------------------------------------------------------------------------------

run m.bin --eval abc.txt --ctx 4,8,32,5000; mv out e.tsv
ok "exit 0 and the title" \
    [ "$rc $(head -1 e.tsv)" = "$(printf '0 ctx\ttokens\tloss\tppl\tbits_per_byte')" ]
table "4 rows, all tokens but the first scored, ppl = exp(loss), bits = loss / ln 2" e.tsv \
    'NR > 1 { r = $4 / exp($3); b = $5 * log(2) - $3
              bad += $2 != 1079 || r < .999 || r > 1.001 || b * b > 1e-8 }
     END { exit bad || NR != 5 }'
run m.bin --eval abc.txt --by-position --ctx 8,32; mv out p.tsv
ok "exit 0 and the title" [ "$rc $(head -1 p.tsv)" = "$(printf '0 ctx\tfrom\tto\ttokens\tloss')" ]
cat e.tsv p.tsv >a
table "by-position to add up to the whole" a '
    NF == 5 && $2 == 1079 { whole[$1] = $3 }
    $1 == "ctx" { parts = $2 == "from"; next }
    parts { n[$1] += $4; sum[$1] += $4 * $5 }
    END { for (c in n) if (n[c] != 1079 || (sum[c] / n[c] - whole[c]) ^ 2 > 1e-10) exit 1
          exit !n[8] || !n[32] }'

# Windows that overlap, against a loop over texts of 10 bytes: the last S targets of every S-th one,
# and all of the first; the last is shorter. And the whole by position.
head -c 28 abc.txt >text
for S in 1 5; do
    : >losses
    for at in $(awk "BEGIN { for (i = 0; i + 9 - $S < 27; i += $S) print i }"); do
        tail -c +$((at + 1)) text | head -c 10 >piece
        run m.bin --eval piece --by-position --ctx 9
        awk "\$2 >= 9 - $S || (NR > 1 && $at == 0)" out >>losses
    done
    run m.bin --eval text --ctx 9 --stride $S; tail -n 1 out >>losses
    run m.bin --eval text --ctx 9 --stride $S --by-position; sed 1d out >>losses
    table "--stride $S: every byte but the first once, the loss of a loop over windows" losses '
        NF == 5 && $2 == 27 { whole = $3; got = 1; next }
        { n[got + 0] += $4; sum += $4 * $5 * !got; at[$2] = 1
          k = got + 0 " " $2; part_n[k] += $4; part[k] += $4 * $5 }
        END { bad = n[0] != 27 || n[1] != 27 || (sum / 27 - whole) ^ 2 > 1e-11
              for (p in at) bad += part_n["0 " p] != part_n["1 " p] ||
                                   (part["0 " p] - part["1 " p]) ^ 2 > 1e-9
              exit bad }'
done
run m.bin --eval abc.txt --ctx 8,32; mv out a
run m.bin --eval abc.txt --ctx 8,32 --stride 8; mv out b
ok "--stride 8 to be no overlap at context 8, and another loss at 32" \
    eval '[ "$(sed -n 2p a)" = "$(sed -n 2p b)" ] && [ "$(sed -n 3p a)" != "$(sed -n 3p b)" ]'
run m.bin --eval abc.txt --ctx 32,16 --stride 32
ok "--stride 32 to be refused at context 16" eval '[ $rc -eq 2 ] && grep -q "32 exceeds .* 16" err'

# From another position on: what is relative does not care, what is absolute does, and a table ends.
for e in $encodings; do
    run $e.bin --eval abc.txt --ctx 8; mv out a
    run $e.bin --eval abc.txt --ctx 8 --first-position 0; same a out
    run $e.bin --eval abc.txt --ctx 8 --first-position 5; mv out b
    case $e in sinusoidal|learned) want='1 ' ;; *) want='0 ' ;; esac
    ok "$e from position 5 on: another loss $want" [ "$want" = "$(cat a b |
        awk -F '\t' '$2 == 1079 { x[++n] = $3 } END { d = x[1] - x[2]; print (d * d > 1e-10) " " }')" ]
done
fails 1 '17 positions .* learned .* 16 '      run learned.bin --eval abc.txt --first-position 1
fails 2 '--first-position needs --eval'       run m.bin --first-position 1

fails 1 'one: nothing to score'               run m.bin --eval one
fails 1 'no.txt: No such file'                run m.bin --eval no.txt
works '' train --steps 3 --val other.txt --log l.tsv --out e.bin abc.txt
run e.bin --eval other.txt
ok "the validation loss of train" [ "$(tail -1 l.tsv | cut -f 4)" = "$(tail -1 out | cut -f 3)" ]
run m.bin --eval abc.txt; mv out a
for f in crlf cr bom; do
    run m.bin --eval $f.txt;                  same a out "--eval to read $f.txt as train does"
done
fails 1 'u16.txt: .*UTF-16'                   run m.bin --eval u16.txt

# ---- Questions and answers -----------------------------------------------------------------------

# a question, the order of its letters reversed: some are learned and some are not
awk 'BEGIN { for (i = 0; i < 400; i++) {
    q = a = ""
    for (k = i % 3; k >= 0; k--) { c = substr("abcd", 1 + int(rand() * 4), 1); q = q c; a = c a }
    print q "=" a } }' >qa.txt
tail -n 40 qa.txt >qa-val.txt
works '360 lines to train on, 40 to validate' \
    loud --answers = --steps 150 --lr 1e-2 --batch 8 --log l.tsv --out q.bin qa.txt
works '' train --answers = --steps 150 --lr 1e-2 --batch 8 --stop-after 70 --out r.bin qa.txt
fails 1 'not the text \(or not the --answers\)' resume r.bin qa.txt
fails 1 'qa.txt: line [0-9]+ has no "b"'      resume r.bin --answers b qa.txt
works '' resume r.bin --answers = --threads 2 qa.txt
same q.bin r.bin "--answers: the same file straight and resumed"
run q.bin --eval qa-val.txt --answers =; mv out e.tsv
ok "exit 0 and the title" \
    [ "$rc $(head -1 e.tsv)" = "$(printf '0 length\tlines\texact\ttokens\tloss')" ]
{ tail -1 l.tsv | cut -f 4; sed 1d e.tsv; } >a
table "three lengths, all lines, each with its answer's tokens; the validation loss of train" a '
    NR == 1 { val = $1; next }
    { lines += $2; n += $4; sum += $4 * $5; right += $2 * $3
      bad += $1 != NR - 1 || $4 != $2 * ($1 + 1) }
    END { exit bad || NR != 4 || lines != 40 || (sum / n - val) ^ 2 > 1e-11 ||
               right < 1 || right > 39 }'
# every line by itself: as greedy generation gives it
while IFS='=' read -r q a; do
    run q.bin -p "$q=" -n $((${#q} + 1)) -t 0
    [ "$(cat out)" = "$q=$a" ] && [ "$(wc -l <out)" -eq 2 ] && right=1 || right=0
    printf '%s\t%s\n' ${#q} $right
done <qa-val.txt >a
sed 1d e.tsv >>a
table "as many exact ones as greedy generation gives" a '
    NF == 2 { right[$1] += $2; next }
    { bad += (right[$1] - $2 * $3) ^ 2 > 1e-6 } END { exit bad }'
# a line as a text: its targets from position 2 on are the answer
for q in ab=ba dc=dc; do
    echo $q >one.txt
    run q.bin --eval one.txt --answers =; sed 1d out >a
    run q.bin --eval one.txt --ctx 5 --by-position; sed 1d out >>a
    table "the loss of $q in a window" a '
        NR == 1 { loss = $5; next }
        $2 >= 2 { n += $4; sum += $4 * $5 } END { exit n != 3 || (sum / n - loss) ^ 2 > 1e-11 }'
done
printf '%s\n' ab=ba cd=dc abcabcab=bacbacba >long.txt
fails 1 'long.txt: line 3 has 17 tokens .*16' run q.bin --eval long.txt --answers =
fails 1 'long.txt: line 3 has 17 tokens .*16' train --answers = --val-frac 0 long.txt
fails 1 'long.txt: line 3 has 17 tokens .*16' train --answers = --val-frac 0.5 long.txt
run q.bin --eval long.txt --answers = --ctx 17
table "two lengths, also past the trained one" out 'END { exit NR != 3 || $1 != 8 || $4 != 9 }'
works '' train --pos learned --answers = --steps 2 --out r.bin qa.txt
fails 1 'learned .* 16 '                      run r.bin --eval long.txt --answers = --ctx 17
printf 'ab=ba\nabba\n' >no-mark.txt; printf 'ab=ba\nab=ba' >no-end.txt
for f in 'no-mark.txt: line 2 has no "="' 'no-end.txt: line 2 has no newline'; do
    fails 1 "$f"                              train --answers = ${f%%:*}
    fails 1 "$f"                              run q.bin --answers = --eval ${f%%:*}
done
printf '' >none.txt
fails 1 'none.txt: nothing to score'             run q.bin --answers = --eval none.txt
for x in '' '->' 'ä'; do
    fails 2 '--answers: ".*" is not one byte' train --answers "$x" qa.txt
done
fails 1 'no-mark.txt: line 2 '                train --answers = --val no-mark.txt qa.txt
works '' train --answers = --val qa-val.txt --steps 2 --out r.bin qa.txt
works '' train --tokenizer "$root/tokenizer.bin" --answers = --steps 2 --out r.bin qa.txt
run r.bin --eval qa-val.txt --answers =
table "lines of a vocabulary of pieces" out '{ n += $2 } END { exit n != 40 }'

# ---- Options of the encoding at inference, RoPE's scalings ---------------------------------------

fails 2 '--t5-max is not .* encoding rope'    run m.bin --t5-max 5
fails 2 'rope-dims 10 .* 8 '                  run m.bin --rope-dims 10
fails 2 '--rope-scaling: "x" is not one of'   run m.bin --rope-scaling x
fails 2 '--rope-factor: 0.5 is not between'   run m.bin --rope-factor 0.5
run m.bin --eval abc.txt --ctx 16,32,64; mv out plain
for s in linear ntk dynamic yarn llama3; do
    run m.bin --eval abc.txt --ctx 16,32,64 --rope-scaling $s; mv out a
    run m.bin --eval abc.txt --ctx 16,32,64 --rope-scaling $s --rope-factor 2; mv out b
    case $s in    # the one that finds its factor: 2 at context 64, within 32 none
        dynamic) sed '$d' plain >c; sed '$d' a >d; same c d "$s: nothing up to the trained length"
                 same a b "$s to ignore the factor" ;;
        *) same plain a "$s by 1 to change nothing" ;;
    esac
    ok "$s by 2 to change the loss at 64" \
        eval '[ $(wc -l <b) -eq 4 ] && [ "$(tail -n 1 plain)" != "$(tail -n 1 b)" ]'
    works '^abc'                              run m.bin --rope-scaling $s --ctx 64 -p abc -n 50
done
run m.bin --eval abc.txt --ctx 64 --rope-scaling ntk --rope-factor 2; tail -n 1 out >b
run m.bin --eval abc.txt --ctx 128,64 --rope-scaling dynamic; tail -n 1 out >c
same b c "dynamic at twice the length to be ntk by 2, whatever context came before"
run m.bin --eval abc.txt --ctx 64 --rope-scaling yarn --rope-factor 2; mv out a
# rope-length, the fifth option in the file: what was trained before the first scaling
trained_before() { od -An -tf8 -j216 -N8 "$1" | tr -d ' '; }
works '' train --init m.bin --ctx 64 --rope-scaling yarn --rope-factor 2 --steps 0 --out y.bin \
    abc.txt
ok "y.bin to remember the 32 of m.bin" [ "$(trained_before y.bin)" = 32 ]
run y.bin --eval abc.txt;                     same a out "the loss of m.bin with the same options"
works '' train --init y.bin --ctx 128 --rope-factor 4 --steps 2 --out z.bin abc.txt
ok "z.bin still to remember the 32" [ "$(trained_before z.bin)" = 32 ]
works '' train --init m.bin --ctx 64 --steps 1 --out z.bin abc.txt
ok "64 without scaling" [ "$(trained_before z.bin)" = 64 ]
works '' train --rope-scaling yarn --rope-length 8 --rope-factor 2 --steps 2 --out z.bin abc.txt
ok "8 when that was asked for" [ "$(trained_before z.bin)" = 8 ]

# ---- Inspection ----------------------------------------------------------------------------------

for e in $encodings; do
    run $e.bin --inspect abc.txt; mv out i.tsv
    ok "exit 0 and the title" [ "$rc $(head -1 i.tsv)" = \
        "$(printf '0 what\tlayer\thead\trow\tcolumn\tvalue')" ]
    # 1080 tokens are 67 windows of 16 and one of 8. The mean weight at a distance times the queries
    # that have it in view, over all distances, is 1 for each query.
    table "$e: six fields, weights of a query that add up to 1, entropies within bounds" i.tsv '
        NF != 6 { bad++ }
        $1 == "weight" { q = 67 * (16 - $4) + ($4 < 8 ? 8 - $4 : 0); sum[$2 " " $3] += $6 * q; w++ }
        $1 == "entropy" { bad += ($4 == 0 && $6 != 0) || $6 < 0 || $6 > log($4 + 1) + 1e-5; n++ }
        END { for (k in sum) bad += sum[k] < 1079.99 || sum[k] > 1080.01
              exit bad || w != 32 || n != 32 }'
    case $e in
        sinusoidal|learned) want=embed,similarity ;; rpe) want=relative ;; t5|alibi) want=bias ;;
        rope) want=angle,turned,wavelength ;; *) want= ;;
    esac
    ok "$e: parts $want" [ "$want" = "$(sed 1d i.tsv | cut -f 1 | sort -u |
        grep -v -e weight -e entropy | tr '\n' , | sed 's/,$//')" ]
done
run sinusoidal.bin --inspect empty; mv out i.tsv
table "16 positions and their similarity, 1 with themselves, the same at equal distances" i.tsv '
    $1 == "embed" { n++ }
    $1 == "similarity" { s++; d = $4 - $5; bad += d == 0 && $6 != 1
                         if (d in at) bad += (at[d] - $6) ^ 2 > 1e-10; at[d] = $6 }
    END { exit bad || n != 256 || s != 256 || NR != 513 }'
run m.bin --inspect /dev/null --rope-scaling linear --rope-factor 4 --ctx 4; mv out i.tsv
table "pair 0 to turn in 4 times 2 pi tokens, its angle to be a fourth of the position" i.tsv '
    $1 == "wavelength" && $4 == 0 { bad += ($6 - 25.1327) ^ 2 > 1e-6 }
    $1 == "angle" && $5 == 0 { n++; bad += ($6 - $4 / 4) ^ 2 > 1e-10 }
    $1 == "turned" { bad += $6 != 1 }
    END { exit bad || n != 4 || NR != 1 + 4 + 16 + 1 }'
run alibi.bin --inspect /dev/null --ctx 40; mv out i.tsv
table "slopes 1/16 and 1/256 up to the context" i.tsv '
    $1 == "bias" { n++; bad += ($6 + $4 / ($3 ? 256 : 16)) ^ 2 > 1e-10 }
    END { exit bad || n != 80 }'
works '' run m.bin --inspect /dev/null --ctx 1
fails 1 'learned .* 16 '                      run learned.bin --inspect abc.txt --ctx 17
fails 1 'no.txt: No such file'                run m.bin --inspect no.txt
fails 2 '--ctx takes one number'              run m.bin --inspect abc.txt --ctx 8,9

# ---- Stopping and resuming -----------------------------------------------------------------------

works 'go on with --resume half.bin'          loud --steps 10 --stop-after 5 --out half.bin abc.txt
fails 2 '--pos alibi .*rope'                  resume half.bin --pos alibi abc.txt
fails 2 '--lr 0.1 .*0.003'                    resume half.bin --lr 0.1 abc.txt
fails 2 '--steps 20 .*10 '                    resume half.bin --steps 20 abc.txt
fails 2 '--dim 32 .*16 '                      resume half.bin --dim 32 abc.txt
fails 2 '--seed '                             resume half.bin --seed 2 abc.txt
fails 2 '--rope-base 5 .*10000 '              resume half.bin --rope-base 5 abc.txt
fails 2 '--rope-scaling yarn .* none '        resume half.bin --rope-scaling yarn abc.txt
fails 2 '--t5-max is not'                     resume half.bin --t5-max 5 abc.txt
fails 1 'bytes.tok'                          resume half.bin --tokenizer bytes.tok abc.txt
fails 1 'other.txt: not the text'             resume half.bin other.txt
fails 1 'foreign: not a model'                resume foreign abc.txt
# as at the start
works '' resume half.bin --pos RoPE --dim 16 --kv-heads 0 --hidden 0 --rope-dims 0 --lr 0.003 \
    --out a abc.txt
works 'nothing to do; saved b' go train --threads 1 --resume a --out b abc.txt
same a b "--resume of a finished run writes --out"
ln -s b link; works '' train --steps 1 --out link abc.txt
ok "a link stays and what it leads to is replaced" eval '[ -h link ] && ! cmp -s a b'
works '' run link -p abc -n 1
train --pos t5 --t5-max 0 --steps 4 --stop-after 2 --out t5.bin abc.txt
works '' train --pos t5 --t5-max 0 --steps 4 --resume t5.bin --out a abc.txt
works '' train --steps 4 --stop-after 2 --val other.txt --out val.bin abc.txt
fails 1 '--val'                               resume val.bin abc.txt
works '' resume val.bin --val other.txt --out a abc.txt
works 'm.bin .*nothing to do'                 go train --resume m.bin abc.txt
fails 2 '--bf16 was not given'                resume half.bin --bf16 abc.txt
if train --bf16 --steps 4 --out half16.bin abc.txt; [ "$rc" -eq 0 ]; then
    mv half16.bin whole16.bin
    works '' train --bf16 --steps 4 --stop-after 2 --out half16.bin abc.txt
    works '' resume half16.bin --threads 2 abc.txt
    same whole16.bin half16.bin "bf16: the same file straight and resumed"
else
    ok "exit 2 and one line with /without products of bf16/" refused 2 'without products of bf16'
fi
works 'matrix products [0-9.]+ %'             loud --profile --steps 2 --out a abc.txt
run m.bin --eval abc.txt;                     cut -f 1,2 out >a; cut -f 3 out | cut -c 1-4 >b
run m.bin --int8 --eval abc.txt;              cut -f 1,2 out >c; same a c "--int8: same tokens"
cut -f 3 out | cut -c 1-4 >c;                 same b c "--int8: the loss of fp32, two digits"
fails 2 '--dim 32 '                           train --init m.bin --dim 32 abc.txt
ok "no word of --resume for --init" [ "$(grep -c -e --resume err)" = 0 ]
works 'pos is not in m.bin' \
    go train --init m.bin --pos learned --ctx 8 --steps 1 --out a abc.txt

nap() { sleep 0.1 2>/dev/null || sleep 1; }
for signal in INT TERM; do
    rm -f i.tsv i.bin; ran="train stopped by SIG$signal"
    $limit "$bin/train" $TINY --steps 1000000 --eval-every 1000000 --log i.tsv --out i.bin \
        abc.txt >out 2>err & pid=$!
    i=0; while [ $i -lt 100 ] && ! grep -q '^3	' i.tsv 2>/dev/null; do nap; i=$((i + 1)); done
    nap; nap; nap    # timeout's parent half may not have run yet: a signal would end it alone
    kill -$signal $pid; wait $pid; rc=$?
    ok "exit 130 and a model" eval '[ $rc -eq 130 ] && [ -s i.bin ]'
    at=$(tail -1 i.tsv | cut -f 1)
    works '' resume i.bin --stop-after $((at + 2)) --log i.tsv --out i.bin abc.txt
    table "the log to go on at step $((at + 1)), none missing or double" i.tsv \
        "NR > 1 { bad += \$1 != NR - 1 } END { exit bad || NR != $at + 3 }"
done
train --steps 2 --out nan.bin abc.txt; cp nan.bin a
fails 1 'step [0-9]+: .*(nan|inf)'            train --lr 1e9 --steps 50 --out nan.bin abc.txt
same a nan.bin "the old file intact"
fails 1 'step [0-9]+: .*(nan|inf)'            train --lr 1e9 --steps 50 --out new.bin abc.txt
gone new.bin new.bin.tmp nan.bin.tmp

# ---- The same bits -------------------------------------------------------------------------------

BIG="--dim 32 --heads 4 --kv-heads 2 --layers 2 --ctx 32 --steps 4"
for n in 1 2 3; do
    works '' train $BIG --batch 4 --threads $n --log a$n.tsv --out a$n.bin abc.txt
done
same a1.bin a2.bin; same a1.bin a3.bin
for more in '--eval-every 1 --save-every 1 --sample-every 1' '--eval-every 1000'; do
    works '' train $BIG --batch 4 $more --out b.bin abc.txt
    same a1.bin b.bin "$more to change nothing"
done
works '' train $BIG --batch 2 --accum 2 --log b.tsv --out b.bin abc.txt
tail -1 a1.tsv >a; tail -1 b.tsv >>a
table "--accum 2 --batch 2 to be --batch 4, within 1e-4" a \
    '{ d = $3 - d; v = $4 - v } END { exit d * d > 1e-8 || v * v > 1e-8 }'
# a text that this model gets worse at; the file tells the best evaluation, which then is not the
# last
echo 2718281828459045 >rise.txt
for n in 1 1000; do
    works '' train --steps 40 --lr 1e-2 --val rise.txt --eval-every $n --out e$n.bin abc.txt
    arenas e$n.bin >e$n
done
same e1 e1000 "the same weights and moments, however often it is evaluated"
works '' train --steps 3 --seed 2 --out b.bin abc.txt; train --steps 3 --out a.bin abc.txt
arenas a.bin >a; arenas b.bin >b
ok "another seed to give another model" eval '! cmp -s a b'

# ---- The log -------------------------------------------------------------------------------------

works '' train --steps 20 --warmup 5 --lr 1e-3 --min-lr 1e-4 --log l.tsv --out a.bin abc.txt
ok "the title of the log" [ "$(head -1 l.tsv)" = \
    "$(printf 'step\ttokens\ttrain_loss\tval_loss\tlr\tgrad_norm\tms\ttok_s')" ]
table "20 rows of 8 fields, tokens counted, 10 validations" l.tsv \
    'NF != 8 { bad++ }
     NR > 1 { bad += $1 != NR - 1 || $2 != 32 * $1; v += $4 != "" }
     END { exit bad || NR != 21 || v != 10 }'
table "a rate that rises to 1e-3 at step 5, falls, and ends at 1e-4" l.tsv \
    'NR > 1 { bad += $1 <= 5 ? $5 <= r : $5 >= r; r = $5; if ($1 == 5) bad += r != 1e-3 }
     END { exit bad || r != 1e-4 }'
works '' train --steps 20 --log l.tsv --out a.bin abc.txt
table "a tenth of the peak at the end by default" l.tsv '{ r = $5 } END { exit r != 3e-4 }'
table "a first loss within 5 % of ln 256" l.tsv 'NR == 2 { exit $3 < 5.27 || $3 > 5.82 }'

# ---- Closed and full outputs ---------------------------------------------------------------------

closed() { ran="$* >&-"; : >out; $limit "$bin/run" -q "$@" >&- 2>err; rc=$?; }
full() { ran="$* >/dev/full"; : >out; $limit "$bin/run" -q "$@" >/dev/full 2>err; rc=$?; }
for more in '-p abc' '-p abc --encode' '--eval abc.txt' '--inspect abc.txt'; do
    fails 1 'standard output: ' closed m.bin $more
    [ ! -c /dev/full ] || fails 1 'standard output: ' full m.bin $more
done
ran="train 2>&-"; rm -f l.tsv
$limit "$bin/train" ${TINY#-q} --steps 5 --log l.tsv --out a.bin abc.txt 2>&-; rc=$?
table "no messages in the log when stderr is closed" l.tsv \
    'NF != 8 { bad++ } END { exit bad || NR != 6 }'

gone ./*.tmp
echo "cli: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
