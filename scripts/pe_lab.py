"""pe_lab.py - what the commands of the laboratory share: options, files that are whole or not
there, tables, calls of ./train and ./run, and how a command ends. No experiment lives here.
"""
import argparse
import concurrent.futures
import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
TRAIN, RUN = HERE / "train", HERE / "run"


class Failure(Exception):
    """What went wrong, in one line; `code` is the exit status."""

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Failure(f"{message} (--help lists the options)", 2)


def number(low, high=1 << 30):
    """A type for argparse."""
    def parse(value):
        if not value.isascii() or not value.isdigit() or not low <= int(value) <= high:
            raise argparse.ArgumentTypeError(f'"{value}" is not a number from {low} to {high}')
        return int(value)
    return parse


# ---- Files ---------------------------------------------------------------------------------------

def read(path):
    return Path(path).read_text(encoding="utf-8")


def write(path, content):
    """Whole or not at all: to a temporary file beside it, renamed."""
    content = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        e.filename = path
        raise


def parse_table(content):
    """Tab-separated rows under a header line -> a list of dictionaries."""
    return list(csv.DictReader(content.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


def read_table(path):
    return parse_table(read(path))


def write_table(path, names, rows):
    cells = [names] + [["" if v is None else str(v) for v in row] for row in rows]
    write(path, "".join("\t".join(row) + "\n" for row in cells))


def cut(text, most):
    """Where the held-out end of a text begins: its last tenth, but at least 16 KiB, at most `most`
    bytes and a quarter; at the start of a line if one is near, else of a character."""
    size = min(max(len(text) // 10, 1 << 14), most, len(text) // 4)
    at = len(text) - size
    newline = text.find(b"\n", at, at + size // 8)
    if newline >= 0:
        return newline + 1
    for _ in range(3):
        if at < len(text) and text[at] & 0xC0 == 0x80:
            at += 1
    return at


# ---- Tables in Markdown --------------------------------------------------------------------------

def markdown(header, rows):
    """A table, for a page."""
    def line(cells):
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"
    return line(header) + "|" + "---|" * len(header) + "\n" + "".join(map(line, rows))


def around(page, name):
    """The parts of a page before and after what stands between the lines <!-- name --> and
    <!-- /name -->, each with its mark."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    parts = re.fullmatch(f"(.*^{re.escape(begin)}\n).*(^{re.escape(end)}$.*)", read(page),
                         re.MULTILINE | re.DOTALL)
    if not parts:
        raise Failure(f"{page}: it has no line {begin} with a line {end} after it")
    return parts.groups()


def put_into(page, name, content):
    """Replaces what stands between the two marks."""
    before, after = around(page, name)
    write(page, before + content + after)


# ---- Running commands ----------------------------------------------------------------------------

def check_programs():
    for program in (TRAIN, RUN):
        if not os.access(program, os.X_OK):
            raise Failure(f"{program} is not there: run make in {HERE}")


def encoding_options(pos):
    """"rope:rope-base=500" -> what tells ./train of it."""
    name, *own = pos.split(":")
    return ["--pos", name, *(f"--{option}" for option in own)]


class Lab:
    """The commands that run for a script with options --out, --jobs and --threads (0: its share of
    the processors)."""

    def __init__(self, args):
        self.args, self.out = args, args.out
        self.live, self.stopping = set(), False
        # 0 leaves it to the programs, which know OMP_NUM_THREADS
        share = max((os.cpu_count() or 1) // args.jobs, 1) if args.jobs > 1 else 0
        self.threads = args.threads or share

    def call(self, command, log=None, lock=None):
        """Runs a command, returns its standard output. Standard error is appended to `log`. A
        failure is raised with the last line of standard error. Ctrl-C does not reach the command
        itself, see stop."""
        with open(log, "ab+") if log else tempfile.TemporaryFile() as errors:
            at = errors.seek(0, 2)
            p = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                                 pass_fds=[lock.fileno()] if lock else [])
            self.live.add(p)
            if self.stopping:
                p.terminate()
            output, _ = p.communicate()
            self.live.discard(p)
            errors.seek(at)
            said = errors.read().decode(errors="replace").splitlines()
        if p.returncode:
            reason = said[-1].split(": ", 1)[-1] if said else f"{command[0]} ended without a word"
            raise Failure(reason, 2 if p.returncode == 2 else 1)
        return output.decode()

    def each(self, calls, jobs, done):
        """Does {key: call}, `jobs` at a time, and tells done(key, result) as they end. What goes
        wrong ends all."""
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            keys = {pool.submit(call): key for key, call in calls.items()}
            try:
                for future in concurrent.futures.as_completed(keys):
                    done(keys[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()
                raise

    def stop(self):
        """Ends the commands that run; a training saves before it ends."""
        self.stopping = True
        for p in list(self.live):
            p.terminate()


# ---- Being a command -----------------------------------------------------------------------------

def interrupted(number, frame):
    raise KeyboardInterrupt


def command(name, main):
    """Runs main(arguments), which returns the exit status (None: 0), as the command of this name:
    what goes wrong is told in a line."""
    sys.stdout.reconfigure(errors="replace")    # a terminal may not have the ±
    for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(caught) != signal.SIG_IGN:
            signal.signal(caught, interrupted)
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
        sys.exit(status)
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except Failure as e:
        print(f"{name}: {e}", file=sys.stderr)
        sys.exit(e.code)
    except OSError as e:
        print(f"{name}: {e.filename or 'output'}: {e.strerror}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w")    # what it still holds cannot be written
        sys.exit(1)
