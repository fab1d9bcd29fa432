# Runs each argument as a command, shows what it prints, adds up its closing line "N passed, N failed", and closes with one.
# A command that ends without such a line, or fails, counts as a failure.
passed=0 failed=0
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
for command in "$@"; do
    echo "== $command"
    $command > "$out" 2>&1
    status=$?
    grep -v 'passed, [0-9]* failed$' "$out"
    counts=$(awk '{ for (i = 2; i < NF; i++) if ($i == "passed,") c = $(i - 1) " " $(i + 1) } END { print c ? c : "0 1" }' "$out")
    p=${counts% *} f=${counts#* }
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then
        echo "FAIL $command ended with status $status"
        f=1
    fi
    passed=$((passed + p)) failed=$((failed + f))
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
