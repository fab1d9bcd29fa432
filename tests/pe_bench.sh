# The tests of scripts/pe-bench, which need Python 3.9; without it nothing is counted.
#     sh tests/pe_bench.sh
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2> /dev/null; then
    exec python3 -B "$(dirname "$0")/test_pe_bench.py"
fi
echo "there is no Python 3.9 here: scripts/pe-bench is not tested"
echo "pe_bench: 0 passed, 0 failed"
