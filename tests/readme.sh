# Runs the commands of the ```sh blocks of all pages named, in order, in one copy of this folder. Then adds the encoding
# of a page's ```c block to posenc.c, as the page says, and trains it.
#     sh tests/readme.sh README.md scripts/README.md tests/README.md
# Without Python 3.9, blocks that call scripts are left out.
passed=0 failed=0
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
cp -R ./train ./run model.h posenc.c train.c run.c tokenizer.bin Makefile scripts tests "$dir"/ || exit 1
python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2> /dev/null && skip= || skip='^scripts/'

try() {
    if (cd "$dir" && timeout 120 sh -c "$1" < /dev/null > "$dir/out" 2>&1); then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $page: $1"
        tail -3 "$dir/out"
    fi
}

blocks() {    # the lines of the blocks of this language, but for those with a line that matches $2, if given
    awk -v begin="^\`\`\`$1\$" -v skip="$2" '
        $0 ~ begin { on = 1; text = ""; keep = 1; next }
        /^```/ { if (on && keep) printf "%s", text; on = 0 }
        on { text = text $0 "\n"; if (skip && $0 ~ skip) keep = 0 }' "$page"
}

add_example() {    # functions go in front of the table of encodings, the row in front of its last one
    awk -v example="$dir/example" '
        function insert(rows,    line, in_rows) {
            while ((getline line < example) > 0) {
                if (line ~ /^\/\/ \.\.\. and in the table/) in_rows = 1
                else if (in_rows == rows) print line
            }
            close(example)
        }
        /^const PosEnc posencs\[\]/ { insert(0) }
        /\.name = NULL/ { insert(1) }
        { print }' posenc.c > "$dir/posenc.c"
}

for page in "$@"; do
    [ -n "$(blocks sh)" ] || { echo "FAIL $page: no command was found"; failed=$((failed + 1)); }
    blocks sh "$skip" | sed -e ':a' -e '/\\$/N; s/\\\n//; ta' > "$dir/commands"
    while IFS= read -r command; do
        case $command in ''|\#*) continue ;; esac
        try "$command"
    done < "$dir/commands"

    blocks c > "$dir/example"
    name=$(sed -n 's/^ *{ \.name = "\([a-z0-9]*\)".*/\1/p' "$dir/example")
    [ -n "$name" ] || continue
    add_example
    try "make -s -B train CFLAGS=-O1"
    try "./train --pos $name --dim 24 --ctx 32 --steps 5 --threads 1 -o added.bin tests/data/stories.txt"
done
echo "readme: $passed passed, $failed failed"
[ $failed -eq 0 ]
