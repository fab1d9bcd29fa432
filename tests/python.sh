# The tests of the scripts in the file named, which need Python 3.9; without it nothing is counted.
#     sh tests/python.sh test_pe_bench.py
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2> /dev/null; then
    exec python3 -B "$(dirname "$0")/$1"
fi
echo "there is no Python 3.9 here: $1 is not run"
echo "$1: 0 passed, 0 failed"
