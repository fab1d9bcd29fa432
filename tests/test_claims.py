"""Tests scripts/claims: its rules on made-up numbers, the sayings without training both ways round,
and a trained one with tiny models.

    python3 tests/test_claims.py        after make; prints "N passed, N failed"
"""
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "claims"
claims = harness.load("claims")

TINY = ("--dim 16 --heads 2 --layers 1 --ctx 16 --batch 2 --steps 30 --seeds 2 --held 1000 "
        "--threads 1").split()
# Those that train nothing, with the verdict each must have.
EXACT = {
    "theta_times_factor": False, "angle_over_position": False, "large_i_high_frequency": False,
    "half_precision_angles": False, "rotate_embedding_once": False, "shift_is_linear": True,
    "neighbours_equally_far": True, "power_overflows": False, "loaded_is_another": False,
    "alibi_by_key_alone": True, "rpe_table_size": False, "base_for_high_frequencies": False}


class Rules(unittest.TestCase):
    low, high = {1: 1.0, 2: 1.5, 3: 1.2}, {1: 1.2, 2: 1.69, 3: 1.41}

    def test_a_saying_holds_when_it_is_told_apart(self):
        for rule, holds in ((claims.less, True), (claims.higher, False)):
            self.assertIs(rule(self.low, self.high, "a", "b").holds, holds)
            self.assertIs(rule(self.high, self.low, "a", "b").holds, not holds)
            self.assertEqual(rule(self.low, self.high, "a", "b").numbers,
                             "a: 1.233, b: 1.433 (-0.200 ± 0.025)")

    def test_noise_decides_nothing(self):
        for a, b in ((self.low, {1: 1.5, 2: 1.4, 3: 1.2}), ({1: 1.0}, {1: 2.0}),    # one seed
                     (self.low, self.low)):
            self.assertIsNone(claims.less(a, b, "a", "b").holds)
            self.assertIsNone(claims.higher(a, b, "a", "b").holds)

    def test_limits(self):
        for limit, holds in ((2, True), (1, None), (0.3, False)):
            self.assertIs(claims.at_most(self.low, limit, "x").holds, holds)
            self.assertIs(claims.at_least(self.low, limit, "x").holds,
                          None if holds is None else not holds)
        self.assertEqual(claims.at_most(self.low, 2, "rises by").numbers,
                         "rises by 1.233 ± 0.625, limit 2")

    def test_every(self):
        for values, holds in (((1, 2), True), ((-1, -2), False), ((1, -2), None)):
            f = claims.every(dict(enumerate(values)), lambda v: v > 0, "x")
            self.assertIs(f.holds, holds)

    def test_both(self):
        def of(*holds):
            return claims.both([claims.Finding(h, "n") for h in holds]).holds
        self.assertIs(of(True, True), True)
        self.assertIs(of(True, None), None)
        self.assertIs(of(None, False), False)

    def test_rounding(self):
        self.assertEqual([claims.rounded(x, 8) for x in (255, 257, 4095, 0.1)],
                         [255, 256, 4096, 0.10009765625])
        self.assertEqual(claims.rounded(2049, 11), 2048)


class Sayings(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dir = Path(tempfile.mkdtemp())
        cls.text = cls.dir / "text.txt"
        cls.text.write_bytes((ROOT / "tests/data/stories.txt").read_bytes()[:20000])

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.dir)

    def command(self, *more, out="out"):
        return [str(word) for word in (sys.executable, "-B", SCRIPT, *TINY, "--text", self.text,
                                       "--out", self.dir / out, *more)]

    def claims(self, *more, **where):
        return subprocess.run(self.command(*more, **where), capture_output=True, text=True,
                              cwd=self.dir, timeout=120)

    def refused(self, result, code, *words):
        self.assertEqual((result.returncode, result.stdout), (code, ""), result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for word in ("claims: ", *words):
            self.assertIn(word, result.stderr)

    def test_exact_ones_turn(self):
        """What has no chance in it has its verdict; with the recipes exchanged, the other one."""
        result = self.claims("--turned", *EXACT)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        lines = [line for line in result.stdout.splitlines() if line[:1] != " "]
        self.assertEqual(len(lines), len(EXACT))
        for line, (name, holds) in zip(lines, EXACT.items()):
            verdict, turned = line.split(" turned: ")
            self.assertEqual(verdict.split(maxsplit=1)[0], name)
            self.assertEqual(verdict.split(maxsplit=1)[1].strip(), claims.VERDICT[holds])
            self.assertTrue(turned.startswith(claims.VERDICT[not holds]), line)

    def test_a_trained_one_turns_and_is_kept(self):
        """Two seeds of three models; once more takes none of it, another setting takes all."""
        result = self.claims("--turned", "index_probe")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertRegex(result.stdout, "index_probe +does not hold +turned: holds +turned round")
        store = self.dir / "out" / "claims-store"

        def trained():
            return {path: path.stat().st_mtime_ns for path in store.glob("*-s*.bin")}
        before = trained()
        names = [path.name.rsplit("-", 1)[0] for path in before]
        for pos in ("none", "rope", "sinusoidal"):
            self.assertEqual(names.count(f"{pos}-s2"), 1)
        story = self.claims("index_probe")
        self.assertEqual(trained(), before)
        for part in ("index_probe: does not hold", "saying", "loss at L rope: ",
                     "command    ./train --pos rope --layers 1", "command    ./run ",
                     "--by-position", "repeat     scripts/claims index_probe; change it at "):
            self.assertIn(part, story.stdout)
        self.claims("index_probe", "--steps", "29")
        self.assertEqual(len(trained()), len(before) + 4)    # rope and none

    def test_the_printed_command_repeats_the_number(self):
        """A line `./run ...` of the story prints the loss that the story tells."""
        story = self.claims("small_base").stdout
        lines = story.splitlines()
        told = [line.split(":")[-1].split() for line in lines if "windows of 16:" in line]
        runs = [line.split("command    ")[1] for line in lines if "command    ./run" in line]
        self.assertEqual(len(runs), 4)
        losses = []
        for run in runs:
            out = subprocess.run(run, shell=True, capture_output=True, text=True, cwd=ROOT).stdout
            losses.append(f"{float(out.splitlines()[1].split(chr(9))[2]):.4f}")
        self.assertEqual(losses, [loss for some in told for loss in some])

    def test_place(self):
        """The code of a saying stands where its line says."""
        lines = SCRIPT.read_text().splitlines()
        for c in claims.CLAIMS.values():
            file, line = c.place.split(":")
            self.assertEqual(file, "scripts/claims")
            self.assertTrue(lines[int(line) - 1].startswith("@claim("), c.name)
            self.assertTrue(c.experiment.__doc__ and c.why and c.saying and c.said != c.known)

    def test_table(self):
        """A row has its cells, and no text that would break a table."""
        c = claims.CLAIMS["rope_is_best"]
        row, = claims.rows([claims.Done(c, claims.Finding(None, "a | b"), None, None)])
        self.assertEqual(dict(zip(claims.HEADER, row)), {
            "name": c.name, "saying": c.saying, "verdict": "not decided here", "numbers": "a | b",
            "explanation": c.why, "command": "scripts/claims rope_is_best", "place": c.place})
        table = claims.markdown([claims.Done(c, claims.Finding(None, "a | b"), None, None)])
        self.assertIn("| a \\| b |", table)
        self.assertFalse(any("\t" in cell or "\n" in cell for c in claims.CLAIMS.values()
                             for cell in (c.saying, c.why)))

    def test_into_a_page(self):
        """The whole table goes between the marks, and nothing else changes; without them a line
        says so before anything is trained."""
        page = self.dir / "page.md"
        page.write_text("before\n<!-- claims -->\nold\n<!-- /claims -->\nafter\n")
        result = self.claims("--into", page)
        self.assertEqual((result.returncode, result.stdout), (0, ""), result.stderr)
        text = page.read_text()
        self.assertRegex(text, r"^before\n<!-- claims -->\n\| saying \| verdict \|")
        self.assertTrue(text.endswith("|\n<!-- /claims -->\nafter\n"))
        table = text.splitlines()[2:-2]
        self.assertEqual(len(table), 2 + len(claims.CLAIMS))
        self.assertEqual({line.count("`") for line in table[2:]}, {2})
        self.assertEqual(self.claims().stdout, "".join(f"{line}\n" for line in table))
        page.write_text("<!-- /claims -->\n<!-- claims -->\n")
        self.refused(self.claims("--into", page, out="x"), 1, "page.md", "<!-- claims -->")
        self.assertFalse((self.dir / "x").exists())
        self.refused(self.claims("--into", page, "small_base", out="x"), 2, "--into")

    def test_list(self):
        result = self.claims("--list")
        names = [line.split()[0] for line in result.stdout.splitlines()]
        self.assertEqual(names, list(claims.CLAIMS))
        self.assertGreaterEqual(len(names), 16)
        self.assertFalse((self.dir / "list").exists())

    def test_misuse(self):
        self.refused(self.claims("ntk_log", out="x"), 2, '"ntk_log" is not a claim', "ntk_log2")
        self.refused(self.claims("zzz", out="x"), 2, "--list")
        self.refused(self.claims("--seeds", "0", out="x"), 2, "--seeds")
        self.refused(self.claims("--text", "absent.txt", out="x"), 1, "absent.txt: No such file")
        short = self.dir / "short.txt"
        short.write_text("short " * 20)
        self.refused(self.claims("--text", short, out="x"), 1, "short.txt", "too short")

    def test_interrupted_leaves_whole_files(self):
        """Ctrl-C ends what runs, and the models that are there were finished."""
        p = subprocess.Popen(self.command("small_base", "--steps", "100000", out="stop"),
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        store, end = self.dir / "stop" / "claims-store", time.monotonic() + 60
        while not list(store.glob("*.tmp")) and not list(store.glob("*.log")):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        p.send_signal(signal.SIGINT)
        _, said = p.communicate(timeout=60)
        self.assertEqual(p.returncode, 130, said)
        self.assertIn("goes on from here", said)
        self.assertEqual(list(store.glob("*-s*.bin*")), [])


if __name__ == "__main__":
    harness.main()
