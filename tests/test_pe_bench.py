"""Tests scripts/pe-bench and scripts/make-tasks: statistics on made-up numbers, pictures, lines of
tasks, and tiny benches from outside.

    python3 tests/test_pe_bench.py        after make; prints "N passed, N failed"
"""
import base64
import contextlib
import html.parser
import json
import math
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree
import zlib
from pathlib import Path

import harness    # finds the modules of scripts/
import pe_lab
import pe_report
import pe_stats
import pe_svg
import pe_tasks
from pe_stats import significant_ranks as ranks

ROOT = Path(__file__).resolve().parent.parent
BENCH, MAKE_TASKS = ROOT / "scripts" / "pe-bench", ROOT / "scripts" / "make-tasks"
TINY = ("--dim 16 --heads 2 --layers 1 --ctx 16 --batch 2 --steps 12 --tokenizer bytes --threads 1 "
        "--pos none,learned,rope --seeds 2 --factors 2 --held 2000").split()
INTERRUPTED = (130, "pe-bench: interrupted; the same command goes on from here")
COPIED = [">dwt=dwt", ">gmlq=gmlq", ">ucavl=ucavl"]


def spread(mean, *offsets):
    """{seed: loss} around a mean."""
    return {seed: mean + offset for seed, offset in enumerate(offsets, 1)}


class Statistics(unittest.TestCase):
    def test_quantiles_are_those_of_the_density(self):
        """The integral of Student's density from 0 to t is 0.475 (Simpson's rule)."""
        for df, t in enumerate(pe_stats.T975, 1):
            scale = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
            n = 2000
            f = [scale * (1 + (t * i / n) ** 2 / df) ** (-(df + 1) / 2) for i in range(n + 1)]
            area = t / n / 3 * (f[0] + f[n] + 4 * sum(f[1:n:2]) + 2 * sum(f[2:n:2]))
            self.assertAlmostEqual(area, 0.475, delta=5e-5, msg=f"{df} degrees of freedom")

    def test_paired(self):
        mean, half = pe_stats.paired({1: 3, 2: 5, 3: 7, 9: 0}, {1: 2, 2: 3, 3: 4, 8: 0})
        self.assertEqual(mean, 2)    # differences 1, 2, 3: standard deviation 1
        self.assertAlmostEqual(half, 4.303 / math.sqrt(3))
        self.assertEqual(pe_stats.paired({1: 3}, {1: 2}), (1, None))
        self.assertEqual(pe_stats.paired({1: 3}, {2: 2}), (None, None))
        self.assertEqual(pe_stats.mean_sd([2, 4]), (3, math.sqrt(2)))
        self.assertEqual(pe_stats.mean_sd([2]), (2, None))

    def test_a_seed_cancels(self):
        """A common scatter far wider than the difference does not hide it."""
        a, b = spread(1, 0, 0.5, -0.4), spread(1.01, 0.0001, 0.5, -0.4001)
        self.assertEqual(ranks({"a": a, "b": b}), [("a", 1), ("b", 2)])

    def test_noise_shares_a_rank(self):
        a, b = spread(1, 0, 0.02, -0.02), spread(1.01, 0.02, -0.02, 0)
        c = spread(2, 0.01, 0, -0.01)
        self.assertEqual(ranks({"c": c, "b": b, "a": a}), [("a", 1), ("b", 1), ("c", 3)])

    def test_chains_share_a_rank(self):
        """a is like b and b like c, a differs from c: all three are one, d is not."""
        losses = {"a": spread(1, 0, 0, 0), "b": spread(1.02, 0.01, -0.01, 0),
                  "c": spread(1.04, 0, 0, 0), "d": spread(1.5, 0, 0, 0)}
        self.assertTrue(pe_stats.told_apart(losses["a"], losses["c"]))
        self.assertFalse(pe_stats.told_apart(losses["b"], losses["c"]))
        self.assertEqual([rank for _, rank in ranks(losses)], [1, 1, 1, 4])

    def test_what_stands_between_equals_is_equal(self):
        """c scatters so much that it may be a: b, between them, is told from a and gets no rank."""
        losses = {"a": spread(1, 0, 0, 0), "b": spread(1.1, 0, 0, 0),
                  "c": spread(1.2, 0.3, -0.3, 0)}
        self.assertTrue(pe_stats.told_apart(losses["a"], losses["b"]))
        self.assertEqual([rank for _, rank in ranks(losses)], [1, 1, 1])

    def test_fractional_ranks(self):
        self.assertEqual(pe_stats.fractional_ranks({"a": 0.5, "b": 0.9, "c": 0.5, "d": 0.1}),
                         {"b": 1, "a": 2.5, "c": 2.5, "d": 4})

    def test_no_ranks_without_pairs(self):
        self.assertEqual(ranks({"a": {1: 1.0}, "b": {1: 2.0}}), [("a", None), ("b", None)])
        self.assertEqual(ranks({"a": {1: 1.0, 2: 1.0}, "b": {3: 2.0, 4: 2.0}}),
                         [("a", 1), ("b", 1)])
        same = {1: 1.5, 2: 1.25}
        self.assertEqual(ranks({"a": same, "b": dict(same)}), [("a", 1), ("b", 1)])


class Pictures(unittest.TestCase):
    data = {"names": ["rope", "other"], "seeds": [1, 2]}

    def test_ticks(self):
        self.assertEqual(pe_svg.nice_ticks(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1])
        self.assertEqual(pe_svg.nice_ticks(-3, 12), [0, 5, 10])
        self.assertEqual(pe_svg.log_ticks(3, 130), [5, 10, 20, 50, 100])
        self.assertEqual([pe_svg.short(v) for v in (12345, 0.25, 3, 1.5e6, -2)],
                         ["12.3k", "0.25", "3", "1.5M", "−2"])
        self.assertEqual(pe_report.buckets(20), [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 19)])
        self.assertEqual(pe_report.buckets(4, 1), [(1, 1), (2, 3)])

    def test_all_are_well_formed(self):
        series = {"rope": {1: [2.0, 2.5], 2: [1.0, 1.5]}, "other": {1: [3.0], 2: [2.0]}}
        chart = pe_report.line_chart(self.data, "a < b & c", series, "x", mark=1.5)
        chart.note("a note")
        pictures = [chart.svg(), pe_svg.heatmap("h", [[0, -1], [0.5, None]], "x", "y"),
                    pe_svg.dots("d", [("one", [pe_svg.Mark(0, [1, 2], 1.5, 1, 2)]),
                                      ("two", [pe_svg.Mark(9, [3], 3, hollow=True)])], "x",
                                dashed=0)]
        for svg in pictures:
            root = xml.etree.ElementTree.fromstring(pe_svg.standalone(svg))
            self.assertTrue(root.tag.endswith("svg"))
            self.assertEqual(root.get("viewBox").split()[2], str(pe_svg.WIDTH))
        self.assertIn("a &lt; b &amp; c", pictures[0])

    def test_points_lie_where_they_belong(self):
        chart = pe_svg.Chart("t", (1, 100), (0, 10), "x", log="x")
        self.assertAlmostEqual(chart.at_x(10), (chart.left + chart.right) / 2)
        self.assertAlmostEqual(chart.at_y(2.5), chart.bottom - (chart.bottom - chart.top) / 4)

    def test_pixels(self):
        """The PNG holds the colours of the values, a blank where there is none."""
        png = base64.b64decode(pe_svg.image([[0, 1], [None, -1]], -1, 1).split(",")[1])
        self.assertEqual(struct.unpack(">II", png[16:24]), (2, 2))
        at = png.index(b"IDAT")
        size, = struct.unpack(">I", png[at - 4:at])
        raw = zlib.decompress(png[at + 4:at + 4 + size])
        self.assertEqual(raw[1:9], bytes((*pe_svg.colour(0, -1, 1), 255, 190, 75, 0, 255)))
        self.assertEqual(raw[10:18], bytes((0, 0, 0, 0, 0, 70, 150, 255)))

    def test_every_encoding_has_its_own_look(self):
        looks = [(dark, dash, kind) for _, dark, dash, kind in pe_svg.STYLES]
        self.assertEqual(len(set(looks)), len(looks))
        self.assertEqual(len({s[3] for s in pe_svg.STYLES[:7]}), 7)
        names = self.data["names"] + ["rope:rope-base=500"]
        styles = [pe_report.style({"names": names}, name) for name in names]
        self.assertEqual(styles, [pe_report.ORDER.index("rope"), 7, 8])


class Sections(unittest.TestCase):
    """Those that depend on run --inspect and --rope-scaling, from rows made up by hand."""

    def rows(self, what, of, layer="-"):
        return [{"what": what, "layer": layer, "head": str(head), "row": str(row),
                 "column": str(column), "value": str(value)} for head, row, column, value in of]

    def check(self, section, charts, table):
        self.assertEqual([name for name, _ in section.charts], charts)
        for _, svg in section.charts:
            xml.etree.ElementTree.fromstring(pe_svg.standalone(svg))
        self.assertEqual({row[0]: row[2:] for row in section.rows}, table)
        self.assertEqual({len(row) for row in section.rows}, {len(section.header)})

    def test_encodings(self):
        n, blank = 3, ["–"] * 5    # positions; columns of the table past them
        pairs = [(p, q) for p in range(n) for q in range(n)]
        rope = (self.rows("angle", [("-", p, i, p / 10 ** i) for p in range(n) for i in (0, 1)])
                + self.rows("wavelength", [("-", i, "-", 2 * math.pi * 10 ** i) for i in (0, 1)])
                + self.rows("turned", [("-", "-", "-", 1)]))
        inspected = {
            "learned": self.rows("embed", [("-", p, i, p - i) for p in range(n) for i in (0, 1)])
            + self.rows("similarity", [("-", p, q, 1 - abs(p - q) / 4) for p, q in pairs]),
            "rpe": self.rows("relative", [("-", p, q, (p == q) / 2) for p, q in pairs], "0")
            + self.rows("relative", [("-", p, q, abs(p - q)) for p, q in pairs], "1"),
            "alibi": self.rows("bias", [(h, d, "-", -d * (h + 1)) for h in (0, 1)
                                        for d in range(n)]),
            "rope": rope, "none": []}
        cosine = [f"{(math.cos(d) + math.cos(d / 10)) / 2:.3f}" for d in (1, 2)]
        self.check(pe_report.encodings({"inspected": inspected}), [
            "encoding-learned-added", "encoding-learned-similarity", "encoding-rpe-layer-1",
            "encoding-rpe-layer-2", "encoding-alibi-bias", "encoding-alibi-similarity",
            "encoding-rope-turns", "encoding-rope-similarity"], {
                "learned": ["0.750", "0.500", *blank], "rpe": ["1.000", "2.000", *blank],
                "alibi": ["-1.500", "-3.000", *blank], "rope": [*cosine, *blank]})
        self.assertIsNone(pe_report.encodings({"inspected": {"none": []}}))

    def test_attention(self):
        """Over heads and the distances of a range, in the first and the last layer."""
        of = [(h, d, "-", (h + 1) * (d + 1) / 100) for h in (0, 1) for d in range(4)]
        rows = [r for layer in "012" for what in ("weight", "entropy")
                for r in self.rows(what, [(*o[:3], o[3] * (int(layer) + 1)) for o in of], layer)]
        data = {"names": ["rope"], "seeds": [1], "inspected": {"rope": rows}}
        section = pe_report.attention(data)
        self.assertEqual(section.rows, [["first layer 1", "0.03"], ["first layer 2", "0.052"],
                                        ["last layer 1", "0.09"], ["last layer 2", "0.16"]])
        self.assertEqual(len(section.charts), 3)
        self.assertIsNone(pe_report.attention({**data, "inspected": {}}))

    def test_scaling(self):
        data = {"settings": {"ctx": 16, "stride": 8, "tune-steps": 2}, "runs": [
            {"pos": "rope", "seed": seed, "by_context": [{"ctx": 16, "stride": 8, "loss": 1.5}]}
            for seed in (1, 2)],
                "scaling": [{"method": method, "factor": factor, "ctx": 16 * factor, "seed": seed,
                             "before": 3.0 - better * seed, "after": 2.0} for factor in (2, 4)
                            for method, better in (("none", 0), ("yarn", 0.1)) for seed in (1, 2)]}
        section = pe_report.scaling(data)
        self.assertEqual([name for name, _ in section.charts], ["scaling-x2", "scaling-x4"])
        self.assertEqual(section.rows[2], ["none", 4, "3.0000", "0.0000", "–", "–", "2.0000",
                                           "0.0000", "–", "–"])
        # differences -0.1 and -0.2: half the interval is 12.706 * 0.0707 / sqrt(2)
        self.assertEqual(section.rows[3], ["yarn", 4, "2.8500", "0.0707", "-0.1500", "0.6353",
                                           "2.0000", "0.0000", "0.0000", "0.0000"])
        for _, svg in section.charts:
            xml.etree.ElementTree.fromstring(pe_svg.standalone(svg))
        self.assertIsNone(pe_report.scaling({**data, "scaling": []}))

    def test_claims(self):
        row = dict.fromkeys(("name", "saying", "verdict", "numbers", "explanation", "command",
                             "place"), "x")
        section = pe_report.claims({"claims": [{**row, "verdict": "holds"}]})
        self.check(section, [], {"x": ["x"] * 4})
        self.assertEqual(section.rows[0][1], "holds")
        self.assertIsNone(pe_report.claims({"claims": []}))


class TaskLines(unittest.TestCase):
    """What make-tasks writes, against the task as it is said."""

    def recalled(q):
        value = {q[i]: q[i + 1] for i in range(0, 2 * len(q) // 3, 2)}
        return "".join(key + value[key] for key in q[2 * len(q) // 3:])

    def added(q):
        a, b = q[::2], q[1::2]
        total = str(int(a[::-1]) + int(b[::-1])).zfill(len(a) + 1)[::-1]
        return "".join(map("".join, zip(a, b, total))) + total[-1]

    def found(q):
        asked = min(len(q) // 2, 10)
        return "".join(letter + str(q.index(letter)) for letter in q[-asked:])

    tasks = {"copy": (lambda q: q, range(1, 41)), "reverse": (lambda q: q[::-1], range(1, 41)),
             "count": (lambda q: q[0] * len(q), range(1, 41)),
             "recall": (recalled, range(3, 41, 3)), "addition": (added, range(2, 41, 2)),
             "index": (found, range(2, 41))}

    def make(self, *options):
        return subprocess.run([sys.executable, "-B", MAKE_TASKS, *map(str, options)],
                              capture_output=True, text=True)

    def lines(self, *options):
        said = self.make(*options)
        self.assertEqual((said.returncode, said.stderr), (0, ""))
        return said.stdout.splitlines()

    def test_answers(self):
        self.assertEqual(list(self.tasks), list(pe_tasks.TASKS))
        for task, (answer, lengths) in self.tasks.items():
            lines = self.lines("--task", task, "--lengths", "1-40", "--lines", 10 * len(lengths))
            for i, line in enumerate(lines):
                begin, question, told = line[0], *line[1:].split("=")
                self.assertEqual(begin, ">")
                self.assertEqual(len(question), lengths[i % len(lengths)], line)
                self.assertEqual(told, answer(question), line)
                if task == "recall":
                    self.assertEqual(len(set(question)) - len(set(question) & set("0123456789")),
                                     len(question) // 3, line)
                if task == "index":
                    asked = min(len(question) // 2, 10)
                    self.assertEqual(len(set(question)), len(question) - asked, line)
            self.assertGreater(len(set(lines)), len(lines) / 2)

    def test_all_choices_occur(self):
        """Every letter, key, digit and place is drawn, and about as often as any other."""
        for task, look, most in (("copy", lambda q: q[0], 26), ("recall", lambda q: q[-1], 26),
                                 ("recall", lambda q: q.index(q[-1]), 7),
                                 ("addition", lambda q: q[0], 10), ("addition", lambda q: q[1], 10),
                                 ("index", lambda q: q[0], 52),
                                 ("index", lambda q: q.index(q[-1]), 10)):
            found = {}
            n = {"addition": 20, "index": 30}.get(task, 21)
            for line in self.lines("--task", task, "--lengths", n, "--lines", 5200):
                key = look(line[1:].split("=")[0])
                found[key] = found.get(key, 0) + 1
            self.assertEqual(len(found), most, task)
            self.assertLess(max(found.values()), 2 * min(found.values()), task)

    def test_lengths(self):
        lines = self.lines("--task", "count", "--lengths", "1-3,2,1-2", "--lines", 7)
        self.assertEqual([len(line) // 2 - 1 for line in lines], [1, 2, 3, 2, 1, 2, 1])

    def test_a_seed_decides(self):
        """The very bytes: another Python or machine has to write the same."""
        self.assertEqual(self.lines("--task", "copy", "--lengths", "3-5", "--lines", 3), COPIED)
        self.assertNotEqual(self.lines("--task", "copy", "--seed", 2), self.lines("--task", "copy"))

    def test_exclude(self):
        with tempfile.TemporaryDirectory() as folder:
            known = Path(folder, "known.txt")
            known.write_text("\n".join(self.lines("--task", "copy", "--lengths", "1-3",
                                                  "--lines", 600)))
            lines = self.lines("--task", "copy", "--lengths", "1-3", "--lines", 3000, "--seed", 2,
                               "--exclude", known)
            both = set(lines) & set(known.read_text().splitlines())
            self.assertEqual({len(line) for line in both}, {4})    # of one letter there are but 26

    def test_misuse(self):
        for options, word in ((["--task", "sort"], "sort"), (["--task", "copy", "--lengths", "0-3"],
                              '"0-3"'), (["--task", "recall", "--lengths", "2,4"], "recall"),
                              (["--task", "copy", "--lines", "-1"], '"-1"'), ([], "--task")):
            said = self.make(*options)
            self.assertEqual((said.returncode, said.stdout), (2, ""))
            self.assertEqual(said.stderr.count("\n"), 1)
            self.assertIn(word, said.stderr)
        said = self.make("--task", "copy", "--exclude", "absent.txt")
        self.assertEqual((said.returncode, said.stderr),
                         (1, "make-tasks: absent.txt: No such file or directory\n"))


class TaskReport(unittest.TestCase):
    """From results made up by hand: a learns both tasks, b one of them and has nothing past it."""

    runs = [{"pos": pos, "seed": seed, "task": task, "by_length": [
        [10, 30, inside], [20, 10, inside + 4 * (task == "copy") * shift], *(
            [] if pos == "b" else [[21, 10, beyond + shift], [40, 10, beyond]])]}
            for pos, task, inside, beyond in (("a", "copy", 0.96, 0.5), ("a", "count", 1.0, 0.2),
                                              ("b", "copy", 0.9, None), ("b", "count", 0.95, None))
            for seed, shift in ((1, 0), (2, 0.01))]

    def test_shares(self):
        self.assertEqual(pe_tasks.shares([[10, 30, 1.0], [20, 10, 0.6], [21, 1, 0.5],
                                          [40, 3, 0.1]]), [0.9, 0.2])
        self.assertEqual(pe_tasks.shares([[20, 10, 0.5]]), [0.5, None])

    def test_tables(self):
        data = pe_tasks.collect({"lines": {"val": 40}}, self.runs, ["a note"])
        (_, header, inside), (_, _, beyond) = pe_tasks.tables(data)
        self.assertEqual(header, ["encoding", "copy", "count", "mean", "rank"])
        self.assertEqual(inside, [["a", "96 ± 1", "100 ± 0", "98", "1.0"],
                                  ["b", "(90 ± 1)", "95 ± 0", "(93)", "(2.0)"]])
        self.assertEqual(beyond, [["a", "50 ± 0", "20 ± 0", "35", "1.0"], ["b", *"––––"]])
        self.assertEqual(pe_tasks.page_table(data), (["`--pos`", "copy", "count"], [
            ["`a`", "96 ± 1 / 50", "100 / 20"], ["`b`", "(90 ± 1 / –)", "95 / –"]]))
        told = " ".join(pe_tasks.explanation(data))
        self.assertIn("copy by 1, count by 2", told)
        self.assertIn("a note", told)
        first, second = pe_tasks.sections(data)
        self.assertEqual(first.header, ["length", "a", "(b)"])
        self.assertEqual(first.rows[-1], ["40", "0.500", "–"])
        self.assertIn("not learned: b", first.charts[0][1])
        self.assertNotIn("not learned", second.charts[0][1])


class Page(html.parser.HTMLParser):
    """Collects what a browser would fetch or run, and tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.fetches, self.tags = [], [], [], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in ("meta", "link"):
            self.open.append(tag)
        self.fetches += [value for key, value in attributes
                         if key in ("href", "src") and not value.startswith("data:")]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


class Outside(unittest.TestCase):
    """pe-bench as a command, in a folder of its own."""

    @classmethod
    def setUpClass(cls):
        cls.dir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.dir)

    def call(self, *words):
        return subprocess.run([sys.executable, "-B", BENCH, *map(str, words)], capture_output=True,
                              text=True, cwd=self.dir, timeout=120)

    def stop(self, words, log, step, number):
        """Sends a signal when the log has come to a step; returns exit code and last words."""
        p = subprocess.Popen([sys.executable, "-B", BENCH, *map(str, words)], cwd=self.dir,
                             text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        until = time.monotonic() + 60
        while time.monotonic() < until and p.poll() is None:
            with contextlib.suppress(OSError):
                if len(log.read_bytes().splitlines()) > step:
                    break
            time.sleep(0.01)
        p.send_signal(number)
        _, said = p.communicate(timeout=60)
        return p.returncode, said.splitlines()[-1] if said else ""

    def table(self, out, name):
        lines = (self.dir / out / name).read_text().splitlines()
        return lines[0].split("\t"), [line.split("\t") for line in lines[1:]]

    def refused(self, result, code, *words):
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for word in ("pe-bench: ", *words):
            self.assertIn(word, result.stderr)

    def plain_page(self, out, sections):
        """One file that asks for nothing, with all pictures that lie beside it."""
        page = Page((self.dir / out / "report.html").read_text())
        self.assertEqual((page.wrong, page.open, page.fetches), ([], [], []))
        self.assertNotIn("script", page.tags)
        pictures = list((self.dir / out).glob("*.svg"))
        self.assertEqual(len(pictures), page.tags["svg"])
        for path in pictures:
            xml.etree.ElementTree.parse(path)
        self.assertEqual(page.tags["section"], sections)


class Benches(Outside):
    """Real, tiny ones. The first is made once and read by many tests."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.text = cls.dir / "text.txt"
        cls.text.write_bytes((ROOT / "tests/data/stories.txt").read_bytes()[:30000])
        cls.first = cls.bench(cls, "--out", cls.dir / "first")

    def bench(self, *more, text=None, tiny=TINY):
        return Outside.call(self, text or self.text, *tiny, *more)

    def numbers(self, out):
        """All that a bench measured but for its speed and memory."""
        names, rows = self.table(out, "finals.tsv")
        return [[row[:names.index("params") + 1] for row in rows]] + [
            self.table(out, name) for name in ("curves.tsv", "by-context.tsv", "by-position.tsv",
                                               "scaling.tsv")]

    def test_table(self):
        self.assertEqual(self.first.returncode, 0, self.first.stderr)
        lines = self.first.stdout.splitlines()
        self.assertLessEqual(max(map(len, lines)), 100)
        self.assertEqual(sorted(line.split()[0] for line in lines[1:4]),
                         ["learned", "none", "rope"])
        learned, = (line for line in lines if line.startswith("learned"))
        self.assertEqual(learned.count("refused"), 2)

    def test_files(self):
        names, rows = self.table("first", "finals.tsv")
        self.assertEqual(names[:4], ["pos", "seed", "val_loss", "params"])
        self.assertEqual([row[:2] for row in rows], [[pos, seed] for pos in
                                                     ("none", "learned", "rope") for seed in "12"])
        params = {row[0]: int(row[3]) for row in rows}
        self.assertEqual(params["learned"] - params["none"], 16 * 16)
        self.assertEqual(params["rope"], params["none"])
        names, rows = self.table("first", "curves.tsv")
        self.assertEqual(len(rows), 6 * 12)
        self.assertEqual([row[2:4] for row in rows[:2]], [["1", "32"], ["2", "64"]])
        names, rows = self.table("first", "by-context.tsv")
        self.assertEqual(names, "pos seed stride ctx tokens loss ppl bits_per_byte".split())
        self.assertEqual(len(rows), 6 * 8)
        self.assertEqual({row[3] for row in rows if row[5] == "refused"}, {"32", "64"})
        self.assertEqual({row[0] for row in rows if row[5] == "refused"}, {"learned"})
        self.assertEqual(len({row[4] for row in rows if row[5] != "refused"}), 1)    # same targets
        names, rows = self.table("first", "by-position.tsv")
        self.assertEqual([row[3:5] for row in rows if row[:3] == ["none", "1", "8"]],
                         [["0", "0"], ["1", "1"], ["2", "3"], ["4", "7"]])
        rows = self.table("first", "scaling.tsv")[1]
        self.assertEqual([row[2] for row in rows], ["1", "2"] * 6)    # every seed

    def test_losses_are_those_of_run(self):
        """What stands in the tables is what ./run says of the model on the held-out text."""
        out = self.dir / "first"
        said = subprocess.run([ROOT / "run", out / "runs/rope-s2/model.bin", "--eval",
                               out / "val.txt", "--ctx", "32", "-q"], capture_output=True,
                              text=True).stdout.splitlines()[1].split("\t")
        _, rows = self.table("first", "by-context.tsv")
        self.assertIn(["rope", "2", "32", *said], rows)
        held = (out / "val.txt").read_bytes()
        self.assertEqual((out / "train.txt").read_bytes() + held, self.text.read_bytes())

    def test_report(self):
        self.plain_page("first", 8)

    def test_again_trains_nothing(self):
        models = {path: path.stat().st_mtime_ns for path in self.dir.glob("first/runs/*/model.bin")}
        again = self.bench("--out", self.dir / "first")
        self.assertEqual((again.returncode, again.stdout, again.stderr), (0, self.first.stdout, ""))
        self.assertEqual(models, {path: path.stat().st_mtime_ns for path in models})

    def test_plan_and_collect_give_the_same_numbers(self):
        plan = self.bench("--out", "second", "--plan").stdout.splitlines()
        self.assertEqual(len(plan), 6)
        for line in plan:
            done = subprocess.run([sys.executable, "-B", *shlex.split(line)], cwd=self.dir,
                                  capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)
        self.assertEqual(self.bench("--out", "second", "--plan").stdout, "")
        collect = [sys.executable, "-B", str(BENCH), "--collect", "--out", "second"]
        subprocess.run(collect, cwd=self.dir, check=True, capture_output=True)
        self.assertEqual(self.numbers("second"), self.numbers("first"))
        shutil.rmtree(self.dir / "second/runs/rope-s2")
        said = subprocess.run(collect, cwd=self.dir, check=True, capture_output=True, text=True)
        self.assertIn("± 95 %", said.stdout)
        self.assertEqual(len(self.table("second", "finals.tsv")[1]), 5)

    def test_into_a_page(self):
        """A table with the numbers of the TSV files goes between the marks; without them a line
        says so."""
        page = self.dir / "page.md"
        page.write_text("a\n<!-- pe-bench first -->\n<!-- /pe-bench first -->\n"
                        "<!-- pe-bench other -->\nkept\n<!-- /pe-bench other -->\n")
        said = self.call("--out", "first", "--collect", "--into", page)
        self.assertEqual((said.returncode, said.stderr), (0, ""))
        before, begin, header, rule, *rows, end = page.read_text().splitlines()[:8]
        self.assertEqual((before, begin, end), ("a", "<!-- pe-bench first -->",
                                                "<!-- /pe-bench first -->"))
        self.assertEqual(header, "| `--pos` | rank | loss at L = 16 | − `rope` | 4L |")
        cells = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in rows}
        self.assertEqual(set(cells), {"`none`", "`learned`", "`rope`"})
        self.assertEqual(cells["`learned`"][3].strip(), "refused")
        self.assertEqual(cells["`rope`"][2].strip(), "–")
        losses = [float(row[2]) for row in self.table("first", "finals.tsv")[1] if row[0] == "none"]
        mean, sd = pe_stats.mean_sd(losses)
        self.assertEqual(cells["`none`"][1].strip(), f"{mean:.3f} ± {sd:.3f}")
        rows = self.table("first", "by-context.tsv")[1]
        at = [{row[1]: float(row[5]) for row in rows if row[0] == "none" and row[2:4] == ["8", ctx]}
              for ctx in ("64", "16")]
        mean, half = pe_stats.paired(*at)
        self.assertEqual(cells["`none`"][3].strip(), f"{mean:+.3f} ± {half:.3f}".replace("-", "−"))
        self.assertTrue(page.read_text().endswith("\nkept\n<!-- /pe-bench other -->\n"))
        page.write_text("nothing\n")
        self.refused(self.call("--out", "first", "--collect", "--into", page), 1, "page.md",
                     "<!-- pe-bench first -->")
        self.refused(self.bench("--out", "x", "--into", "absent.md"), 1, "absent.md: No such file")

    def test_interrupted_goes_on(self):
        """Stopped in the middle of a training, and once more by kill -9: the same numbers."""
        longer = ["--steps", "3000", "--seeds", "1", "--pos", "rope", "--factors", ""]
        words = [self.text, *TINY, *longer, "--out", "third"]
        log = self.dir / "third/runs/rope-s1/log.tsv"
        self.assertEqual(self.stop(words, log, 300, signal.SIGTERM), INTERRUPTED)
        self.assertFalse((log.parent / "result.json").exists())
        self.assertEqual(self.stop(words, log, 900, signal.SIGKILL)[0], -signal.SIGKILL)
        until = time.monotonic() + 60    # the training outlives its parent and keeps the folder
        while True:
            end = self.bench(*longer, "--out", "third")
            if end.returncode == 0 or time.monotonic() > until:
                break
            self.assertIn("another process works on this run", end.stderr)
            time.sleep(0.05)
        self.assertEqual(end.returncode, 0, end.stderr)
        self.assertEqual(self.bench(*longer, "--out", "whole").returncode, 0)
        self.assertEqual(self.numbers("third"), self.numbers("whole"))

    def test_what_differs_is_named(self):
        self.refused(self.bench("--out", "first", "--steps", "13"), 1, "--steps 12, now 13")
        other = self.dir / "other.txt"
        other.write_bytes(self.text.read_bytes() + b"more\n")
        self.refused(self.bench("--out", "first", text=other), 1, "made with text ", "--out")
        result = self.dir / "first/runs/none-s1/result.json"
        was = result.read_text()
        foreign = json.loads(was)
        foreign["settings"]["lr"] = 1
        result.write_text(json.dumps(foreign))
        self.refused(self.bench("--out", "first"), 1, "none-s1 was made with --lr 1, now 0.003")
        result.write_text(was[:40])
        self.refused(self.bench("--out", "first"), 1, "result.json: damaged")
        result.write_text(was)

    def test_one_seed_is_not_ranked(self):
        said = self.bench("--out", "single", "--seeds", "1", "--pos", "none,alibi", "--factors", "")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("nothing is ranked", said.stdout)
        self.assertIn("none ± 95 %", said.stdout)    # without rope the first one is compared with
        self.assertEqual({line.split()[1] for line in said.stdout.splitlines()[1:3]}, {"–"})

    def test_variants(self):
        base = "rope:rope-base=500"
        said = self.bench("--out", "variants", "--pos", f"rope,{base}", "--factors", "")
        self.assertEqual(said.returncode, 0, said.stderr)
        lines = said.stdout.splitlines()
        self.assertLessEqual(max(map(len, lines)), 100)
        self.assertEqual(sum(line.split()[0].endswith("base=500") for line in lines), 1)
        _, rows = self.table("variants", "finals.tsv")
        losses = {(row[0], row[1]): row[2] for row in rows}
        self.assertNotEqual(losses["rope", "1"], losses[base, "1"])

    def test_a_loss_that_diverges_is_told(self):
        hot = [*TINY, "--lr", "1e9", "--train", "--clip 0", "--factors", "", "--seeds", "1"]
        said = self.bench("--out", "hot", tiny=hot)
        self.assertEqual(said.returncode, 1)
        self.assertIn("no run is finished", said.stderr.splitlines()[-1])
        self.assertIn("the loss is", said.stderr.splitlines()[-1])

    def test_misuse(self):
        self.refused(self.bench("--pos", "rope,ropee", "--out", "x"), 2, "ropee", "alibi")
        self.refused(self.bench("--pos", "rope,rope", "--out", "x"), 2, "twice")
        self.refused(self.bench("--seeds", "0", "--out", "x"), 2, "--seeds")
        self.refused(self.bench("--heads", "3", "--out", "x"), 2, "3")
        self.refused(self.bench("--pos", "alibi:rope-base=1", "--out", "x"), 2, "rope-base")
        self.refused(self.bench("--stride", "17", "--out", "x"), 2, "--stride 17")
        self.refused(self.bench("--frobnicate", "--out", "x"), 2, "--frobnicate")
        self.refused(self.bench("--run", "rope-s9", "--out", "x"), 2, "rope-s9", "rope-s1")
        self.refused(self.bench(text="absent.txt"), 1, "absent.txt: No such file")
        self.refused(self.bench("--tokenizer", "absent.bin"), 1, "absent.bin: No such file")
        self.refused(self.bench("--out", self.text), 1, "text.txt")
        short = self.dir / "short.txt"
        short.write_text("Too short. " * 20)
        self.refused(self.bench("--out", "y", text=short), 1, "short.txt", "longer text")
        (self.dir / "empty.txt").write_text("")
        self.refused(self.bench("--out", "z", text="empty.txt"), 1, "empty")
        self.refused(subprocess.run([sys.executable, "-B", BENCH, "--collect", "--out", "none"],
                                    cwd=self.dir, capture_output=True, text=True), 1, "none")


class TaskBenches(Outside):
    tiny = ("--dim 16 --heads 2 --layers 1 --steps 20 --threads 1 --pos learned,rope "
            "--seeds 1").split()

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.first = cls.call(cls, "--tasks", "count,recall", *cls.tiny, "--out", "first")

    def begun(self, out):
        """The corpora, so that they are not made again."""
        (self.dir / out).mkdir()
        for path in self.dir.glob("first/*.txt"):
            shutil.copy(path, self.dir / out)

    def test_table(self):
        self.assertEqual(self.first.returncode, 0, self.first.stderr)
        lines = self.first.stdout.splitlines()
        self.assertLessEqual(max(map(len, lines)), 100)
        self.assertEqual([line.split()[0] for line in lines[:8]],
                         ["exact", "encoding", "learned", "rope"] * 2)
        self.assertEqual(lines[6].split()[1:], ["–"] * 4)    # learned has nothing past 20

    def test_files(self):
        """Every line of every length is judged, and as ./run judges it."""
        names, rows = self.table("first", "tasks.tsv")
        self.assertEqual(names, ["pos", "seed", "task", "length", "lines", "exact"])
        for pos, task, lengths in (("learned", "count", range(1, 21)),
                                   ("learned", "recall", range(3, 21, 3)),
                                   ("rope", "count", range(1, 41)),
                                   ("rope", "recall", range(3, 41, 3))):
            some = [row for row in rows if (row[0], row[2]) == (pos, task)]
            self.assertEqual([int(row[3]) for row in some], list(lengths))
            lines = sum(int(row[4]) for row in some)
            self.assertEqual(lines, 2000 if pos == "learned" else 4000)
        said = subprocess.run([ROOT / "run", "-q", "first/runs/recall-rope-s1/model.bin", "--eval",
                               "first/recall-far.txt", "--answers", "=", "--ctx", "67"],
                              cwd=self.dir, capture_output=True, text=True).stdout.splitlines()
        self.assertEqual([(row[3], float(row[5])) for row in rows if row[0] == "rope"
                          and row[2] == "recall" and int(row[3]) > 20],
                         [(str(int(n) - 1), float(exact)) for n, _, exact, *_ in
                          map(str.split, said[1:])])
        train, val = ((self.dir / f"first/recall-{part}.txt").read_text().splitlines()
                      for part in ("train", "val"))
        self.assertEqual({len(line) for line in set(train) & set(val)} - {7}, set())
        self.plain_page("first", 2)

    def test_again_plan_and_collect(self):
        again = self.call("--tasks", "count,recall", *self.tiny, "--out", "first")
        self.assertEqual((again.returncode, again.stdout, again.stderr), (0, self.first.stdout, ""))
        self.begun("second")
        plan = self.call("--tasks", *self.tiny, "--out", "second", "--tasks", "recall", "--plan")
        plan = plan.stdout.splitlines()
        self.assertEqual([line.split()[-1] for line in plan],
                         ["recall-learned-s1", "recall-rope-s1"])
        for line in plan:
            done = self.call(*shlex.split(line)[1:])
            self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)
        self.assertEqual(self.call("--collect", "--out", "second").returncode, 0)
        self.assertEqual(self.table("second", "tasks.tsv")[1],
                         [row for row in self.table("first", "tasks.tsv")[1] if row[2] == "recall"])

    def test_interrupted_goes_on(self):
        words = ["--tasks", "count", *self.tiny, "--pos", "rope", "--steps", 400, "--out"]
        self.begun("third"), self.begun("whole")
        log = self.dir / "third/runs/count-rope-s1/log.tsv"
        self.assertEqual(self.stop([*words, "third"], log, 100, signal.SIGTERM), INTERRUPTED)
        self.assertFalse((log.parent / "result.json").exists())
        for out in ("third", "whole"):
            self.assertEqual(self.call(*words, out).returncode, 0)
        self.assertEqual(self.table("third", "tasks.tsv"), self.table("whole", "tasks.tsv"))

    def test_misuse(self):
        def bench(*more):
            return self.call(*self.tiny, *more)
        self.refused(bench("--tasks", "copy,sort", "--out", "x"), 2, "sort", "reverse")
        self.refused(bench("--tasks", "copy", "a.txt"), 2, "a.txt", "no text")
        for option in ("--ctx", "--tune-steps", "--factors"):
            self.refused(bench("--tasks", "copy", option, "2"), 2, option, "--tasks")
        self.refused(bench("--tasks", "count,recall", "--out", "first", "--steps", "21"), 1,
                     "--steps", "21", "take another --out")
        self.refused(bench("a.txt", "--out", "first"), 1, "a.txt")
        self.refused(bench("--tasks", "count", "--out", "first", "--run", "rope-s1"), 2,
                     "count-rope-s1")


class Cut(unittest.TestCase):
    def test_size(self):
        def held(n, most=1 << 16):
            return n - pe_lab.cut(b"x" * n, most)
        self.assertEqual([held(n) for n in (400_000, 10_000_000, 100_000, 20_000)],
                         [40_000, 1 << 16, 1 << 14, 5_000])
        self.assertEqual(held(400_000, 1000), 1000)

    def test_place(self):
        text = b"a line of text\n" * 10000
        self.assertEqual(text[pe_lab.cut(text, 1 << 16) - 1:][:2], b"\na")
        text = "ä€😀".encode() * 20000
        for size in range(70000, 70010):
            text[pe_lab.cut(text, size):].decode()


if __name__ == "__main__":
    harness.main()
