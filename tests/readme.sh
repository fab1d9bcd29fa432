# Runs every command of the README's ```sh blocks, in order, in a copy of this folder. sh tests/readme.sh README.md
passed=0 failed=0
readme=$1
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
cp -R ./train ./run model.h posenc.c train.c run.c tokenizer.bin Makefile scripts "$dir"/ || exit 1
mkdir "$dir/tests" && cp -R tests/* "$dir/tests/"
awk '/^```sh$/ { on = 1; next } /^```/ { on = 0 } on' "$readme" | sed -e ':a' -e '/\\$/N; s/\\\n//; ta' > "$dir/commands"
while IFS= read -r command; do
    case $command in ''|\#*) continue ;; esac
    if (cd "$dir" && timeout 120 sh -c "$command" < /dev/null > "$dir/out" 2>&1); then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $command"
        tail -3 "$dir/out"
    fi
done < "$dir/commands"
[ $passed -gt 0 ] || { echo "no command was found in $readme"; failed=1; }
echo "readme: $passed passed, $failed failed"
[ $failed -eq 0 ]
