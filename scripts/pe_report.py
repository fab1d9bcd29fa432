"""pe_report.py - what pe-bench found on a text, as tables, report.html and SVG files.

The report is one file without scripts that asks for nothing else. It is a list of SECTIONS, each a
function of the data (see TextBench.collect in pe-bench) that returns a Section, or None when the
data does not have it. A new part of the laboratory is one more function in that list.
"""
import collections
import math
import re
import statistics
from html import escape

import pe_svg
from pe_lab import write
from pe_stats import mean_sd, paired, significant_ranks, with_spread
from pe_svg import Chart, Mark, dots, heatmap, short

# Colours go by this list, so an encoding has its own in every picture of every report.
ORDER = ("none", "sinusoidal", "learned", "rpe", "t5", "alibi", "rope")

# `see` and `why`: a sentence each. charts: (file name, picture). The table has the same numbers.
Section = collections.namedtuple("Section", "title see why charts header rows")

PAGE = """
body{margin:0 auto;padding:16px;max-width:1240px;font:16px/1.5 system-ui,sans-serif;
background:#fff;color:#1a1a1a}
h1{font-size:1.5em;margin:.2em 0}h2{font-size:1.2em;margin:2em 0 .3em}
p{max-width:48em;margin:.5em 0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:16px;
margin:12px 0}.charts svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px;white-space:nowrap}
th,td{padding:2px 10px 2px 0;text-align:right;vertical-align:top;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:#fff}
th{font-weight:600;border-bottom:1px solid #999}
.text,.long{text-align:left}.long{white-space:normal;min-width:14em}
summary{cursor:pointer}
@media screen and (prefers-color-scheme:dark){body{background:#161616;color:#ececec}
th:first-child,td:first-child{background:#161616}}
@media print{body{max-width:none;font-size:11pt}.charts{grid-template-columns:1fr 1fr}
.charts svg,tr{break-inside:avoid}h2{break-after:avoid}.scroll{overflow:visible}
table{font-size:8pt;white-space:normal}}
"""


def style(data, name):
    """Its place in pe_svg.STYLES; variants such as rope:rope-base=500 come after ORDER."""
    others = [n for n in data["names"] if n not in ORDER]
    at = ORDER.index(name) if name in ORDER else len(ORDER) + others.index(name)
    return at % len(pe_svg.STYLES)


def fixed(value, digits=4):
    return "–" if value is None else f"{value:.{digits}f}"


# ---- Reading the results of runs -----------------------------------------------------------------

def by_seed(runs, value):
    """{name: {seed: value(run)}}, without what is None."""
    found = {}
    for r in runs:
        if (v := value(r)) is not None:
            found.setdefault(r["pos"], {})[r["seed"]] = v
    return found


def loss_at(run, ctx, stride):
    """Loss of a run in windows of ctx tokens that score their last `stride` (0: all); None where
    the encoding refuses, or none were measured."""
    return next((e["loss"] for e in run["by_context"]
                 if e["ctx"] == ctx and e["stride"] == (stride or ctx)), None)


def gather(data, points):
    """{name: {x: values of the seeds}} from the (x, value) of points(run)."""
    series = {name: {} for name in data["names"]}
    for r in data["runs"]:
        for x, value in points(r):
            series[r["pos"]].setdefault(x, []).append(value)
    return {name: of_x for name, of_x in series.items() if of_x}


def buckets(n, first=0):
    """(from, to) of 0, 1, 2-3, 4-7, ... below n, as run --by-position has them; from 1 on without
    the 0."""
    edges = [first] + [1 << k for k in range(n.bit_length()) if first < 1 << k < n] + [n]
    return [(a, b - 1) for a, b in zip(edges, edges[1:]) if a < b]


def summary(data):
    """A dictionary for each encoding, best first, of means over its seeds: loss at the trained
    length, paired difference to the reference, loss at longer contexts (None: refused), and by how
    much the longest is worse than the trained length; speeds are medians."""
    runs, stride, ctx = data["runs"], data["settings"]["stride"], data["settings"]["ctx"]
    losses = by_seed(runs, lambda r: r["val_loss"])
    at = {c: by_seed(runs, lambda r: loss_at(r, c, stride)) for c in (ctx, *data["beyond"])}
    rows = []
    for name, rank in significant_ranks(losses):
        own = [r for r in runs if r["pos"] == name]
        mean, sd = mean_sd(losses[name].values())
        difference, half = paired(losses[name], losses[data["reference"]])
        beyond = [at[c].get(name) for c in data["beyond"]]
        rise = paired(beyond[-1], at[ctx][name]) if any(beyond[-1:]) else (None, None)
        speed = {}
        for key in own[0]["speed"]:
            measured = [r["speed"][key] for r in own if r["speed"][key] is not None]
            speed[key] = statistics.median(measured) if measured else None
        rows.append({"name": name, "rank": rank or "–", "mean": mean, "sd": sd,
                     "difference": difference, "half": half, "rise": rise,
                     "beyond": [of and statistics.fmean(of.values()) for of in beyond],
                     "params": own[0]["params"], "speed": speed})
    return rows


# ---- Lines and their table -----------------------------------------------------------------------

def line_chart(data, title, series, xlabel, log="x", xticks=None, mark=None,
               ylabel="loss, nats per token", y=None):
    """Lines of {name: {x: values of the seeds}}: the mean, and a band from lowest to highest."""
    xs = [x for points in series.values() for x in points]
    ys = [y for points in series.values() for values in points.values() for y in values]
    low, high = min(ys), max(ys)
    room = (high - low) * 0.05 or 0.1
    y = y or ((low * 0.9, high * 1.1) if "y" in log else (low - room, high + room))
    names = {name: pe_svg.shortened(name, 15) for name in series}
    chart = Chart(title, (min(xs), max(xs)), y, xlabel, ylabel, log=log, xticks=xticks,
                  right=32 + 7 * max(map(len, names.values())))
    lines = [(names[name], style(data, name), sorted(series[name].items())) for name in series]
    if len(data["seeds"]) > 1:
        for _, k, points in lines:
            chart.band([(x, min(values), max(values)) for x, values in points], k)
    lines = [(name, k, [(x, statistics.fmean(values)) for x, values in points])
             for name, k, points in lines]
    for _, k, points in lines:
        chart.line(points, k)
    if mark and min(xs) < mark < max(xs):
        chart.mark(mark, "trained length")
    chart.names(lines)
    return chart


def line_table(series, what, show=fixed):
    """Rows of means, a column for each name."""
    xs = sorted({x for points in series.values() for x in points})
    return [what, *series], [[short(x), *(show(statistics.fmean(p[x])) if x in p else "–"
                                          for p in series.values())] for x in xs]


# ---- The sections --------------------------------------------------------------------------------

def curves(data):
    series = gather(data, lambda r: [(step, val) for step, _, _, val in r["curve"]])
    train = gather(data, lambda r: [(step, loss) for step, _, loss, _ in r["curve"]])
    return Section(
        "Loss while training",
        "A line is the mean over the seeds and its band reaches from the lowest seed to the "
        "highest: see where lines part, and whether they still approach each other at the end.",
        "All start from the same weights and see the same windows in the same order, so only the "
        "encoding parts them; a gap that still shrinks may be gone in a longer run.",
        [("loss-held-out", line_chart(data, "Held-out loss", series, "step").svg()),
         ("loss-training", line_chart(data, "Training loss, mean since the last point", train,
                                      "step").svg())], *line_table(series, "step"))


def finals(data):
    losses = by_seed(data["runs"], lambda r: r["val_loss"])
    rows, differences, table = [], [], []
    base = losses[data["reference"]]
    for row in data["summary"]:
        name, mean, difference, half = (row[k] for k in ("name", "mean", "difference", "half"))
        own, sd, k = losses[name], row["sd"], style(data, name)
        rows.append((name, [Mark(k, own.values(), mean, *interval(mean, sd))]))
        pairs = [own[seed] - base[seed] for seed in own if seed in base]
        if name == data["reference"]:
            difference = half = None
        elif pairs:
            differences.append((name, [Mark(k, pairs, difference, *interval(difference, half))]))
        table.append([name, row["rank"], *map(fixed, (mean, sd, difference, half)),
                      *(fixed(own.get(seed)) for seed in data["seeds"])])
    charts = [("final-loss", dots("Final loss, and its deviation", rows, "nats/token"))]
    if differences:
        charts.append(("difference", dots(f"Difference to {data['reference']}, seed by seed",
                                          differences, "nats/token", dashed=0)))
    return Section(
        "Final loss",
        "Small marks are single seeds, large ones their means; the bar of a loss is one standard "
        "deviation to each side, that of a difference its 95 % interval, and where it crosses the "
        "dashed 0 the difference is inside the noise.",
        "One seed gives all encodings the same start and the same data, so what it does to two of "
        "them alike cancels in their difference; with few seeds the interval is wide because the "
        "scatter itself is hardly known (t distribution).",
        charts, ["encoding", "rank", "mean", "sd", f"− {data['reference']}", "± 95 %",
                 *(f"seed {seed}" for seed in data["seeds"])], table)


def interval(mean, half):
    """Its ends, None without one."""
    return (None, None) if half is None else (mean - half, mean + half)


def contexts(data):
    s, charts, table = data["settings"], [], []
    ctx = s["ctx"]
    refused = sorted({r["pos"] for r in data["runs"] for e in r["by_context"] if e["loss"] is None})
    kinds = [("windows", None, "without overlap")]
    if s["stride"]:
        kinds.append(("sliding", s["stride"], f"sliding, the last {s['stride']} scored"))
    for name, stride, scored in kinds:
        series = gather(data, lambda r: [
            (e["ctx"], e["loss"]) for e in r["by_context"] if e["loss"] is not None
            and e["stride"] == (stride or e["ctx"])])
        chart = line_chart(data, f"Loss at the trained length of {ctx}, and past it", series,
                           f"tokens in a window ({scored})", mark=ctx,
                           xticks=[(c, str(c)) for c in s["eval-ctx"]])
        if refused:
            chart.note(f"{', '.join(refused)}: no positions past the trained length")
        charts.append((f"context-{name}", chart.svg()))
        header, rows = line_table(series, "windows")
        table += [[f"{name} {row[0]}", *row[1:]] for row in rows]
    return Section(
        "Loss against context length",
        "Every point scores the same tokens; right of the dashed line are lengths that were never "
        "trained, and a line that rises there met positions or distances that are new to it.",
        "Longer windows without overlap have fewer targets near a beginning with nothing before "
        "them, so their mean falls even if nothing far is used (the early token curse, Press et "
        "al. 2022); a sliding window scores its end alone, which is the fair comparison.",
        charts, header, table)


def positions(data):
    known = {(r["pos"], r["seed"]): [e for e in r["by_position"] if e["loss"] is not None]
             for r in data["runs"]}
    if not any(known.values()):
        return None

    def points(r):
        rows = known[r["pos"], r["seed"]]
        longest = max(e["ctx"] for e in rows)
        return [(e["from"] + 1, e["loss"]) for e in rows if e["ctx"] == longest]
    series = gather(data, points)
    longest = max(e["ctx"] for rows in known.values() for e in rows)
    chart = line_chart(data, f"Windows of {longest}, or as long as allowed", series,
                       "first position of a range (from 1)", mark=data["settings"]["ctx"] + 0.5)
    return Section(
        "Loss by position",
        "A point is the mean loss at the positions from here to the next point: lines fall while "
        "more context helps, and what rises behind the dashed line breaks there.",
        "A mean over a window mixes trained positions with new ones; position by position the "
        "start, where nothing can be known, and the part past the trained length stand apart.",
        [("by-position", chart.svg())], *line_table(series, "position"))


def matrix(rows, what, layer="-", axes=("row", "column")):
    """The values of one kind as a list of lists."""
    cells = {tuple(int(r[axis]) for axis in axes): float(r["value"]) for r in rows
             if r["what"] == what and r["layer"] == layer}
    height, width = (max(indices) + 1 for indices in zip(*cells))
    return [[cells.get((i, k)) for k in range(width)] for i in range(height)]


def encodings(data):
    """Heat maps of what --inspect of seed 1's model printed, whatever kinds are in it."""
    charts, table, shown = [], [], [1, 2, 4, 8, 16, 32, 64]

    def add(name, kind, title, *picture, **options):
        charts.append((f"encoding-{name.replace(':', '-')}-{kind}",
                       heatmap(f"{name}{title}", *picture, **options)))

    for name, rows in data["inspected"].items():
        kinds = collections.defaultdict(list)
        for r in rows:
            kinds[r["what"]].append(float(r["value"]))
        alike = None    # what the table has: a word and the values by distance
        if "embed" in kinds:
            cosine = matrix(rows, "similarity")
            add(name, "added", ": what is added", matrix(rows, "embed"), "dimension", "position")
            add(name, "similarity", ": cosine of two positions", cosine, "position", "position",
                (-1, 1))
            alike = "cosine to position 0", [row[0] for row in cosine]
        if "angle" in kinds:
            angle = matrix(rows, "angle")
            mean = [statistics.fmean(math.cos(2 * math.pi * n / w) for w in kinds["wavelength"])
                    for n in range(len(angle))]
            add(name, "turns", f": cos of the angle ({kinds['turned'][0]:.0f} of {len(angle[0])} "
                "pairs turn once)", [[math.cos(a) for a in row] for row in angle], "pair",
                "position", (-1, 1))
            add(name, "similarity", ": mean cos over the pairs",
                [[mean[abs(p - q)] for q in range(len(mean))] for p in range(len(mean))],
                "position of key", "position of query", (-1, 1))
            alike = "mean cos", mean
        if "bias" in kinds:
            bias = matrix(rows, "bias", axes=("head", "row"))
            mean = [statistics.fmean(column) for column in zip(*bias)]
            n = min(len(mean), 128)
            add(name, "bias", ": added to the score", bias, "distance", "head",
                height=max(24 * len(bias), 60))
            add(name, "similarity", ": the same by position, mean of the heads",
                [[mean[p - q] if q <= p else None for q in range(n)] for p in range(n)],
                "position of key", "position of query")
            alike = "mean bias", mean
        layers = sorted({int(r["layer"]) for r in rows if r["what"] == "relative"})
        for layer in sorted({*layers[:1], *layers[-1:]}):
            cosine = matrix(rows, "relative", str(layer))
            add(name, f"layer-{layer + 1}", f", layer {layer + 1}: cosine of two of its vectors",
                cosine, "distance", "distance", (-1, 1))
            alike = f"cosine to distance 0, layer {layer + 1}", [row[0] for row in cosine]
        if alike:
            table.append([name, alike[0], *(fixed(alike[1][n], 3) if n < len(alike[1]) else "–"
                                            for n in shown)])
    if not charts:
        return None
    return Section(
        "What the encodings look like",
        "Of seed 1's models after training: what is added to the embedding, how far pairs of q and "
        "k are turned, or what is added to a score, each with a matrix that says how alike two "
        "positions are; stripes along the diagonal mean that only the distance counts.",
        "Fast pairs tell neighbours apart and slow ones far positions (Vaswani et al. 2017, Su et "
        "al. 2021), so the cosine falls with the distance without anybody teaching it; a learned "
        "table shows such an order only as far as training put it there.",
        charts, ["encoding", "at distance", *map(str, shown)], table)


def attention(data):
    """Mean weight by distance in the first and the last layer, and entropy by position."""
    weight, entropy = {"first": {}, "last": {}}, {}
    for name, rows in data["inspected"].items():
        values = collections.defaultdict(list)
        for r in rows:
            if r["what"] in ("weight", "entropy"):
                values[r["what"], r["layer"], int(r["row"])].append(float(r["value"]))
        if not values:
            continue
        layers = sorted({layer for _, layer, _ in values}, key=int)
        n = 1 + max(row for *_, row in values)

        def mean(what, layers, first, last):
            return statistics.fmean(v for layer in layers for row in range(first, last + 1)
                                    for v in values[what, layer, row])
        for which, layer in (("first", layers[0]), ("last", layers[-1])):
            weight[which][name] = {a: [mean("weight", [layer], a, b)] for a, b in buckets(n, 1)}
        entropy[name] = {a + 1: [mean("entropy", layers, a, b)] for a, b in buckets(n)}
    if not entropy:
        return None
    charts, table = [], []
    for which, series in weight.items():
        charts.append((f"attention-{which}-layer", line_chart(
            data, f"Weight by distance, {which} layer", series,
            "tokens back (first of a range)", "xy", ylabel="mean weight").svg()))
        header, rows = line_table(series, "distance", lambda v: f"{v:.2g}")
        table += [[f"{which} layer {row[0]}", *row[1:]] for row in rows]
    charts.append(("attention-entropy", line_chart(
        data, "Entropy of the weights, all layers", entropy, "first position of a range (from 1)",
        ylabel="nats").svg()))
    return Section(
        "What attention does",
        "The mean weight that a query gives to one key so many tokens back, over all heads of a "
        "layer, and how spread its weights are, where looking at p tokens alike has an entropy of "
        "ln p.",
        "A penalty by distance (alibi) forces a fall that others have to learn; without an "
        "encoding the first layer knows tokens by their content alone, and its line falls only "
        "because early queries have few keys to share their weight among.",
        charts, header, table)


def scaling(data):
    """Hollow: scaled, filled: tuned."""
    if not data["scaling"]:
        return None
    s, charts, table, rope = data["settings"], [], [], ORDER.index("rope")
    trained = by_seed(data["runs"], lambda r: loss_at(r, s["ctx"], s["stride"]))["rope"]
    by_factor = collections.defaultdict(dict)    # {factor: {method: {"before": {seed: loss}, ...}}}
    for r in data["scaling"]:
        losses = by_factor[r["factor"]].setdefault(r["method"], {"before": {}, "after": {}})
        for when, of_seed in losses.items():
            of_seed[r["seed"]] = r[when]
    for factor, methods in by_factor.items():
        rows = []
        for method, losses in methods.items():
            marks, cells = [], []
            for when, of_seed in losses.items():
                mean, sd = mean_sd(of_seed.values())
                unscaled = methods["none"][when] if method != "none" else {}
                cells += map(fixed, (mean, sd, *paired(of_seed, unscaled)))
                marks.append(Mark(rope, of_seed.values(), mean, hollow=when == "before"))
            rows.append((method, marks))
            table.append([method, factor, *cells])
        charts.append((f"scaling-x{factor}", dots(
            f"{factor} times the length: windows of {factor * s['ctx']}", rows, "nats/token",
            dashed=statistics.fmean(trained.values()))))
    return Section(
        "RoPE past its length: scalings",
        f"The rope models with their angles scaled as they are (hollow), and after "
        f"{s['tune-steps']} steps of fine-tuning at that length (filled); small marks are single "
        "seeds, and the dashed line is the mean loss at the trained length.",
        "Past the trained length slow pairs reach angles that were never seen; linear squeezes all "
        "pairs back and blurs neighbours, ntk, yarn and llama3 leave fast pairs as they are, and "
        "dynamic is ntk when one window has the whole length, as here (Peng et al. 2024).",
        charts, ["method", "times", *(head for word in ("scaled", "tuned") for head in (
            word, "sd", "− none", "± 95 %"))], table)


def speed(data):
    measured = (("train_tok_s", "train-speed", "Training", "tokens/s"),
                ("generate_tok_s", "generation-speed", "Generation", "tokens/s"),
                ("first_ms", "first-token", "Time to the first token", "ms"),
                ("train_mib", "memory", "Peak memory of training", "MiB"))
    charts = []
    for key, file, title, unit in measured:
        values = by_seed(data["runs"], lambda r: r["speed"][key])
        rows = [(row["name"], [Mark(style(data, row["name"]), values.get(row["name"], {}).values(),
                                    row["speed"][key])]) for row in data["summary"]]
        if values:
            charts.append((file, dots(title, rows, unit, start=0)))
    prompt = data["runs"][0]["speed"]["prompt_tokens"]
    return Section(
        "Speed and memory",
        f"Small marks are single runs, large ones their medians; the first token comes after a "
        f"prompt of {prompt} tokens, and a scatter as wide as a gap means that the machine was "
        "busy, not that an encoding is slow.",
        "An encoding is a table that is looked up or a few additions to each score, little beside "
        "the matrix products of a model, so speed and memory are hardly a reason to choose one.",
        charts, ["encoding", "parameters", *(f"{title}, {unit}" for _, _, title, unit in measured)],
        [[row["name"], f"{row['params']:,}", *("–" if row["speed"][key] is None else
                                               f"{row['speed'][key]:g}" for key, *_ in measured)]
         for row in data["summary"]])


def claims(data):
    """The table that scripts/claims --out DIR left there."""
    if not data["claims"]:
        return None
    names = ["saying", "verdict", "numbers", "explanation", "command", "place"]
    return Section(
        "Sayings, tried",
        "Each row is a saying about positional encodings with the verdict of one short experiment; "
        "its command tells the whole story, and its code stands at the place named.",
        "Where chance has a part, differences inside the noise of the seeds decide nothing; the "
        "experiments use small models of their own, see scripts/claims --help.",
        [], names, [[row[name] for name in names] for row in data["claims"]])


SECTIONS = (curves, finals, contexts, positions, encodings, attention, scaling, speed, claims)


# ---- The page ------------------------------------------------------------------------------------

SETTINGS = ("dim", "layers", "heads", "ctx", "batch", "steps", "lr")    # what the page tells


def subject(data):
    return data["facts"]["name"]


def sections(data):
    return [section for make in SECTIONS if (section := make(data))]


def explanation(data):
    """What the table says and does not say, in paragraphs."""
    s, facts, seeds = data["settings"], data["facts"], len(data["seeds"])
    seen, held = data["runs"][0]["curve"][-1][1], facts["held_bytes"]
    rest = (facts["bytes"] - held) / held * facts["held_tokens"]    # estimated, in tokens
    windows = (f"sliding windows that score their last {s['stride']}" if s["stride"] else
               "windows without overlap")
    beyond = f"; beyond it: {windows}" if data["beyond"] else ""
    parts = [f"{facts['name']}: {facts['bytes']:,} bytes, of which the last {held:,} "
             f"({facts['held_tokens']:,} tokens) are held out; a run trains on {short(seen)} "
             f"tokens, {seen / rest:.2g} times the rest. Losses are in nats per held-out token, "
             "all on the same ones; another text has noise of its own. val: windows of "
             f"{s['ctx']}, the trained length{beyond}."]
    if seeds > 1:
        parts.append(f"± sd: over {seeds} seeds. ± 95 %: t interval of the difference seed by "
                     "seed, for each pair by itself. A rank begins only where every encoding above "
                     "differs from every one below: what is inside the noise shares a rank.")
    else:
        parts.append("One seed has no spread, so nothing is ranked: gaps below some hundredths of "
                     "a nat are noise. Take --seeds 3 or more.")
    if any(None in row["beyond"] for row in data["summary"]):
        parts.append("refused: the encoding has no positions past the trained length.")
    return parts + data["notes"]


def html_table(header, rows):
    """Columns of words are read from the left, numbers compared by their ends."""
    columns = zip(*rows) if rows else ((),) * len(header)
    words = [all(re.search("[a-z]{2}", str(cell)) for cell in column) for column in columns]

    def cells(row, tag):
        for cell, is_words in zip(map(str, row), words):
            kind = " class=long" if len(cell) > 24 else " class=text" if is_words else ""
            yield f"<{tag}{kind}>{escape(cell)}</{tag}>"
    body = "".join(f"<tr>{''.join(cells(row, 'td'))}</tr>" for row in rows)
    return (f'<div class="scroll"><table><thead><tr>{"".join(cells(header, "th"))}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>")


def tables(data):
    """(title, header, rows) of what is printed, as text."""
    keys = ("train_tok_s", "generate_tok_s", "first_ms", "train_mib")
    reference = data["reference"].split(":")[0]
    header = ["encoding", "rank", "val loss ± sd", f"− {reference} ± 95 %",
              *(f"at {c}" for c in data["beyond"]), "params", "train/s", "gen/s", "first ms", "MiB"]
    return [("", header, [
        [row["name"], str(row["rank"]), with_spread(row["mean"], row["sd"], 4),
         difference(data, row, 4), *("refused" if loss is None else fixed(loss)
                                     for loss in row["beyond"]), f"{row['params'] / 1e6:.3f}M",
         *("–" if row["speed"][key] is None else short(float(f"{row['speed'][key]:.3g}"))
           for key in keys)] for row in data["summary"]])]


def difference(data, row, digits):
    if row["name"] == data["reference"] or row["difference"] is None:
        return "–"
    return with_spread(row["difference"], row["half"], digits, "+")


def page_table(data):
    """Header and rows of the table for a page."""
    ctx, far = data["settings"]["ctx"], data["beyond"][-1:]
    header = ["`--pos`", "rank", f"loss at L = {ctx}", f"− `{data['reference']}`",
              *(f"{c // ctx}L" for c in far)]
    rows = []
    for row in data["summary"]:
        rise, half = row["rise"]
        cells = [with_spread(row["mean"], row["sd"], 3), difference(data, row, 3),
                 *("refused" if rise is None else with_spread(rise, half, 3, "+") for _ in far)]
        rows.append([f"`{row['name']}`", row["rank"], *(c.replace("-", "−") for c in cells)])
    return header, rows


def write_page(out, data, module):
    """report.html and the SVG files of a bench; `module`, this one or pe_tasks, has its SETTINGS,
    subject, tables, explanation and sections."""
    def told(value):    # of each task, if they have their own
        return (", ".join(f"{task} {v}" for task, v in value.items()) if isinstance(value, dict)
                else value)
    settings = "; ".join(f"{key} {told(data['settings'][key])}" for key in module.SETTINGS)
    title = f"Positional encodings on {module.subject(data)}"
    parts = [f"<h1>{escape(title)}</h1>", paragraph(
        f"{settings}; seeds {', '.join(map(str, data['seeds']))}.")]
    for caption, header, rows in module.tables(data):
        parts += [paragraph(caption) if caption else "", html_table(header, rows)]
    parts += map(paragraph, module.explanation(data))
    for section in module.sections(data):
        pictures = "".join(f"<div>{svg}</div>" for _, svg in section.charts)
        parts.append(f"<section><h2>{escape(section.title)}</h2>"
                     f'{paragraph(f"{section.see} {section.why}")}<div class="charts">{pictures}'
                     "</div><details open><summary>Numbers</summary>"
                     f"{html_table(section.header, section.rows)}</details></section>")
        for name, svg in section.charts:
            write(out / f"{name}.svg", pe_svg.standalone(svg))
    write(out / "report.html", f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{PAGE}{pe_svg.css()}</style></head><body>
{chr(10).join(filter(None, parts))}
</body></html>
""")


def paragraph(text):
    return f"<p>{escape(text)}</p>"
