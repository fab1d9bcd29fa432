"""pe_report.py - what pe-bench found, as report.html and SVG files.

The report is one file without scripts that asks for nothing else. It is a list of SECTIONS, each a
function of the data (see collect in pe-bench) that returns a Section, or None when the data does
not have it. A new part of the laboratory is one more function in that list.
"""
import collections
import math
import re
import statistics
from html import escape

import pe_stats
import pe_svg
from pe_svg import Chart, dots, heatmap, short

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
    known = name.split(":")[0]
    if name == known and known in ORDER:
        return ORDER.index(known)
    return len(ORDER) + [n for n in data["names"] if n not in ORDER].index(name)


def fixed(value, digits=4):
    return "–" if value is None else f"{value:.{digits}f}"


def buckets(n, first=0):
    """(from, to) of 0, 1, 2-3, 4-7, ... below n, as run --by-position has them; from 1 on without
    the 0."""
    edges = [first] + [1 << k for k in range(n.bit_length()) if first < 1 << k < n] + [n]
    return [(a, b - 1) for a, b in zip(edges, edges[1:]) if a < b]


def line_chart(data, title, series, xlabel, log="x", xticks=None, mark=None, ylabel="nats/token",
               y=None):
    """Lines of {name: {x: values of the seeds}}: the mean, and a band from lowest to highest."""
    xs = [x for points in series.values() for x in points]
    ys = [y for points in series.values() for values in points.values() for y in values]
    low, high = min(ys), max(ys)
    room = (high - low) * 0.05 or 0.1
    y = y or ((low * 0.9, high * 1.1) if "y" in log else (low - room, high + room))
    chart = Chart(title, (min(xs), max(xs)), y, xlabel, ylabel, log=log, xticks=xticks)
    for name, points in series.items():
        order = sorted(points)
        if len(data["seeds"]) > 1:
            chart.band([(x, min(points[x]), max(points[x])) for x in order], style(data, name))
    for name, points in series.items():
        chart.line([(x, statistics.fmean(points[x])) for x in sorted(points)], style(data, name))
    if mark and min(xs) < mark < max(xs):
        chart.mark(mark, "trained length")
    chart.legend([(name, style(data, name)) for name in series])
    return chart


def line_table(series, what, show=fixed):
    """Rows of means, a column for each name."""
    xs = sorted({x for points in series.values() for x in points})
    return [what, *series], [[short(x) if not isinstance(x, str) else x,
                              *(show(statistics.fmean(p[x])) if x in p else "–"
                                for p in series.values())] for x in xs]


def gather(data, pick):
    """{name: {x: values of the seeds}} from the (x, value) that pick(result) has."""
    series = {name: {} for name in data["names"]}
    for r in data["runs"]:
        for x, value in pick(r):
            series[r["pos"]].setdefault(x, []).append(value)
    return {name: points for name, points in series.items() if points}


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
    by_name = {row["name"]: row for row in data["summary"]}
    losses = gather(data, lambda r: [(r["seed"], r["val_loss"])])
    rows, differences, table = [], [], []
    base = losses[data["reference"]]
    for name, row in by_name.items():
        own, k = losses[name], style(data, name)
        spread = (row["mean"] - row["sd"], row["mean"] + row["sd"]) if row["sd"] else (None, None)
        rows.append((name, k, [v for (v,) in own.values()], row["mean"], *spread))
        pairs = [own[seed][0] - base[seed][0] for seed in sorted(own) if seed in base]
        if name != data["reference"] and pairs:
            ends = [None if row["half"] is None else row["difference"] + sign * row["half"]
                    for sign in (-1, 1)]
            differences.append((name, k, pairs, row["difference"], *ends))
        table.append([name, row["rank"] or "–", fixed(row["mean"]), fixed(row["sd"]),
                      *("–" if name == data["reference"] else fixed(row[key])
                        for key in ("difference", "half")),
                      *(fixed(own[seed][0]) if seed in own else "–" for seed in data["seeds"])])
    charts = [("final-loss", dots("Final loss, and its deviation", rows, "nats/token"))]
    if differences:
        charts.append(("difference", dots(f"Difference to {data['reference']}, seed by seed",
                                          differences, "nats/token", zero=True)))
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


def contexts(data):
    s, charts, joined = data["settings"], [], {}
    ticks = [(c, str(c)) for c in s["eval-ctx"]]
    refused = sorted({r["pos"] for r in data["runs"] for e in r["by_context"] if e["loss"] is None})
    for sliding, name, title in (
            (False, "context-windows", "Windows without overlap"),
            (True, "context-sliding", f"Sliding windows, the last {s['stride']} scored")):
        if sliding and not s["stride"]:
            continue
        series = gather(data, lambda r: [
            (e["ctx"], e["loss"]) for e in r["by_context"] if e["loss"] is not None
            and e["stride"] == (s["stride"] if sliding else e["ctx"])])
        chart = line_chart(data, title, series, "tokens in a window", xticks=ticks, mark=s["ctx"])
        if refused:
            chart.note(f"{', '.join(refused)}: refused past {s['ctx']}, no such positions")
        charts.append((name, chart.svg()))
        header, rows = line_table(series, "windows")
        joined[title.split()[0].lower()] = rows
    return Section(
        "Loss against context length",
        "Every point scores the same tokens; right of the dashed line are lengths that were never "
        "trained, and a line that rises there met positions or distances that are new to it.",
        "Longer windows without overlap have fewer targets near a beginning with nothing before "
        "them, so their mean falls even if nothing far is used (the early token curse, Press et "
        "al. 2022); a sliding window scores its end alone, which is the fair comparison.",
        charts, header, [[f"{kind} {row[0]}", *row[1:]] for kind, rows in joined.items()
                         for row in rows])


def positions(data):
    def pick(r):
        known = [e for e in r["by_position"] if e["loss"] is not None]
        longest = max(e["ctx"] for e in known)
        return [(e["from"] + 1, e["loss"]) for e in known if e["ctx"] == longest]
    if not any(e["loss"] is not None for r in data["runs"] for e in r["by_position"]):
        return None
    series = gather(data, pick)
    longest = max(e["ctx"] for r in data["runs"] for e in r["by_position"])
    chart = line_chart(data, f"Windows of {longest}, or as long as allowed", series,
                       "first position of a range (from 1)", mark=data["settings"]["ctx"] + 0.5)
    return Section(
        "Loss by position",
        "A point is the mean loss at the positions from here to the next point: lines fall while "
        "more context helps, and what rises behind the dashed line breaks there.",
        "A mean over a window mixes trained positions with new ones; position by position the "
        "start, where nothing can be known, and the part past the trained length stand apart.",
        [("by-position", chart.svg())], *line_table(series, "position"))


def matrix(rows, what, layer="-"):
    """The values of one kind as a list of lists."""
    cells = {(int(r["row"]), int(r["column"])): float(r["value"]) for r in rows
             if r["what"] == what and r["layer"] == layer}
    if not cells:
        return None
    height, width = (max(axis) + 1 for axis in zip(*cells))
    return [[cells.get((i, k)) for k in range(width)] for i in range(height)]


def encodings(data):
    """Heat maps of what --inspect of seed 1's model printed, whatever kinds are in it."""
    charts, table, shown = [], [], [1, 2, 4, 8, 16, 32, 64]

    def add(name, kind, picture):
        charts.append((f"encoding-{name.replace(':', '-')}-{kind}", picture))

    for name, rows in data["inspected"].items():
        of_kind = collections.defaultdict(list)
        for r in rows:
            of_kind[r["what"]].append(r)
        distance = None    # value at distance n, for the table
        if of_kind["embed"]:
            add(name, "added", heatmap(f"{name}: what is added", matrix(rows, "embed"),
                                       "dimension", "position"))
            same = matrix(rows, "similarity")
            add(name, "similarity", heatmap(f"{name}: cosine of two positions", same, "position",
                                            "position", (-1, 1)))
            distance = ("cosine to position 0", lambda n: same[n][0] if n < len(same) else None)
        if of_kind["angle"]:
            angle = matrix(rows, "angle")
            turned = int(float(of_kind["turned"][0]["value"]))
            add(name, "turns", heatmap(
                f"{name}: cos of the angle ({turned} of {len(angle[0])} pairs turn once)",
                [[math.cos(a) for a in row] for row in angle], "pair", "position", (-1, 1)))
            waves = [float(r["value"]) for r in of_kind["wavelength"]]
            mean = [statistics.fmean(math.cos(2 * math.pi * n / w) for w in waves)
                    for n in range(len(angle))]
            add(name, "similarity", heatmap(
                f"{name}: mean cos over the pairs", [[mean[abs(p - q)] for q in range(len(mean))]
                                                     for p in range(len(mean))],
                "position of key", "position of query", (-1, 1)))
            distance = ("mean cos", lambda n: mean[n] if n < len(mean) else None)
        if of_kind["bias"]:
            heads = collections.defaultdict(dict)
            for r in of_kind["bias"]:
                heads[int(r["head"])][int(r["row"])] = float(r["value"])
            bias = [[of[n] for n in sorted(of)] for _, of in sorted(heads.items())]
            mean = [statistics.fmean(column) for column in zip(*bias)]
            add(name, "bias", heatmap(f"{name}: added to the score", bias, "distance", "head",
                                      height=max(24 * len(bias), 60)))
            n = min(len(mean), 128)
            add(name, "similarity", heatmap(
                f"{name}: the same by position, mean of the heads",
                [[mean[p - q] if q <= p else None for q in range(n)] for p in range(n)],
                "position of key", "position of query"))
            distance = ("mean bias", lambda n: mean[n] if n < len(mean) else None)
        layers = sorted({r["layer"] for r in of_kind["relative"]}, key=int)
        for layer in dict.fromkeys(layers[:1] + layers[-1:]):
            relative = matrix(rows, "relative", layer)
            add(name, f"layer-{int(layer) + 1}", heatmap(
                f"{name}, layer {int(layer) + 1}: cosine of two of its vectors", relative,
                "distance", "distance", (-1, 1)))
            distance = (f"cosine to distance 0, layer {int(layer) + 1}",
                        lambda n: relative[n][0] if n < len(relative) else None)
        if distance:
            table.append([name, distance[0], *(fixed(distance[1](n), 3) for n in shown)])
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
    weight = {"first": {}, "last": {}}
    entropy = {}
    for name, rows in data["inspected"].items():
        sums = collections.defaultdict(list)
        for r in rows:
            if r["what"] in ("weight", "entropy"):
                sums[r["what"], int(r["layer"]), int(r["row"])].append(float(r["value"]))
        layers = sorted({key[1] for key in sums})
        if not layers:
            continue
        n = 1 + max(key[2] for key in sums)

        def mean(what, some, first, last):
            return statistics.fmean(v for layer in some for at in range(first, last + 1)
                                    for v in sums[what, layer, at])
        for which, layer in (("first", layers[0]), ("last", layers[-1])):
            weight[which][name] = {a: [mean("weight", [layer], a, b)] for a, b in buckets(n, 1)}
        entropy[name] = {a + 1: [mean("entropy", layers, a, b)] for a, b in buckets(n)}
    if not entropy:
        return None
    charts = [(f"attention-{which}-layer",
               line_chart(data, f"Weight by distance, {which} layer", weight[which],
                          "tokens back (first of a range)", "xy", ylabel="mean weight").svg())
              for which in weight]
    charts.append(("attention-entropy", line_chart(
        data, "Entropy of the weights, all layers", entropy, "first position of a range (from 1)",
        ylabel="nats").svg()))
    tables = [line_table(weight[which], "distance", lambda v: f"{v:.2g}") for which in weight]
    return Section(
        "What attention does",
        "The mean weight that a query gives to one key so many tokens back, over all heads of a "
        "layer, and how spread its weights are, where looking at p tokens alike has an entropy of "
        "ln p.",
        "A penalty by distance (alibi) forces a fall that others have to learn; without an "
        "encoding the first layer knows tokens by their content alone, and its line falls only "
        "because early queries have few keys to share their weight among.",
        charts, tables[0][0], [[f"{which} layer {row[0]}", *row[1:]]
                               for which, (_, rows) in zip(weight, tables) for row in rows])


def scaling(data):
    """Hollow: scaled, filled: tuned; a small mark is a seed, a large one the mean."""
    if not data["scaling"]:
        return None
    s, charts, rows, rope = data["settings"], [], [], ORDER.index("rope")
    trained = [[e["loss"] for e in r["by_context"] if e["ctx"] == s["ctx"]][-1]
               for r in data["runs"] if r["pos"] == "rope"]
    by_factor = collections.defaultdict(lambda: collections.defaultdict(dict))
    for r in data["scaling"]:
        by_factor[r["factor"]][r["method"]][r["seed"]] = r
    for factor, methods in by_factor.items():
        losses = {(method, when): {seed: r[when] for seed, r in of_seed.items()}
                  for method, of_seed in methods.items() for when in ("before", "after")}
        ends = [v for of_seed in losses.values() for v in of_seed.values()] + trained
        pad = (max(ends) - min(ends)) * 0.06 or 0.1
        chart = Chart(f"{factor} times the length: windows of {factor * s['ctx']}",
                      (min(ends) - pad, max(ends) + pad), (len(methods), 0), "nats/token",
                      yticks=[], height=26 * len(methods), left=70)
        chart.mark(statistics.fmean(trained))
        for i, method in enumerate(methods):
            chart.parts.append(pe_svg.text(62, chart.at_y(i + 0.5) + 4, method, "end"))
            row = [method, factor]
            for when in ("before", "after"):
                own = losses[method, when]
                mean, sd = pe_stats.mean_sd(own.values())
                unscaled = losses.get(("none", when), {}) if method != "none" else {}
                row += map(fixed, (mean, sd, *pe_stats.paired(own, unscaled)[1:]))
                for v in own.values():
                    chart.dot(v, i + 0.75, rope, 2, hollow=when == "before")
                chart.dot(mean, i + 0.5, rope, 5, hollow=when == "before")
            rows.append(row)
        charts.append((f"scaling-x{factor}", chart.svg()))
    return Section(
        "RoPE past its length: scalings",
        f"The rope models with their angles scaled as they are (hollow), and after "
        f"{s['tune-steps']} steps of fine-tuning at that length (filled); small marks are single "
        "seeds, and the dashed line is the mean loss at the trained length.",
        "Past the trained length slow pairs reach angles that were never seen; linear squeezes all "
        "pairs back and blurs neighbours, ntk, yarn and llama3 leave fast pairs as they are, and "
        "dynamic is ntk when one window has the whole length, as here (Peng et al. 2024).",
        charts, ["method", "times", *(head for word in ("scaled", "tuned") for head in (
            word, "sd", "− none", "± 95 %"))], rows)


def speed(data):
    measured = (("train_tok_s", "train-speed", "Training", "tokens/s"),
                ("generate_tok_s", "generation-speed", "Generation", "tokens/s"),
                ("first_ms", "first-token", "Time to the first token", "ms"),
                ("train_mib", "memory", "Peak memory of training", "MiB"))
    charts = []
    for key, file, title, unit in measured:
        rows = []
        for row in data["summary"]:
            values = [r["speed"][key] for r in data["runs"]
                      if r["pos"] == row["name"] and r["speed"][key] is not None]
            rows.append((row["name"], style(data, row["name"]), values, row["speed"][key], None,
                         None))
        if any(values for _, _, values, *_ in rows):
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


def overview(data):
    """Header and rows of the printed table, as text."""
    def with_spread(value, spread, sign=""):
        return f"{value:{sign}.4f}" + ("" if spread is None else f" ± {spread:.4f}")
    keys = ("train_tok_s", "generate_tok_s", "first_ms", "train_mib")
    reference = data["reference"].split(":")[0]
    header = ["encoding", "rank", "val loss ± sd", f"− {reference} ± 95 %",
              *(f"at {c}" for c in data["beyond"]), "params", "train/s", "gen/s", "first ms", "MiB"]
    return header, [
        [row["name"], str(row["rank"] or "–"), with_spread(row["mean"], row["sd"]),
         "–" if row["name"] == data["reference"] or row["difference"] is None else
         with_spread(row["difference"], row["half"], "+"),
         *("refused" if loss is None else fixed(loss) for loss in row["beyond"]),
         f"{row['params'] / 1e6:.3f}M",
         *("–" if row["speed"][key] is None else short(float(f"{row['speed'][key]:.3g}"))
           for key in keys)] for row in data["summary"]]


def write(out, data, save):
    """report.html and the SVG files; save(path, content) writes one."""
    page(out, data, data["facts"]["name"],
         ("dim", "layers", "heads", "ctx", "batch", "steps", "lr"),
         [html_table(*overview(data)), *paragraphs(explanation(data))],
         [make(data) for make in SECTIONS], save)


def paragraphs(parts):
    return [f"<p>{escape(part)}</p>" for part in parts]


def page(out, data, subject, keys, lead, sections, save):
    """The page of a bench on `subject`, with its settings of these keys and a lead in HTML."""
    def told(value):    # of each task, if they have their own
        return (", ".join(f"{task} {v}" for task, v in value.items()) if isinstance(value, dict)
                else value)
    settings = "; ".join(f"{key} {told(data['settings'][key])}" for key in keys)
    parts = [f"<h1>Positional encodings on {escape(subject)}</h1>",
             f"<p>{escape(settings)}; seeds {', '.join(map(str, data['seeds']))}.</p>", *lead]
    for section in filter(None, sections):
        pictures = "".join(f"<div>{svg}</div>" for _, svg in section.charts)
        parts.append(f"<section><h2>{escape(section.title)}</h2><p>{escape(section.see)} "
                     f'{escape(section.why)}</p><div class="charts">{pictures}</div>'
                     f"<details open><summary>Numbers</summary>"
                     f"{html_table(section.header, section.rows)}</details></section>")
        for name, svg in section.charts:
            save(out / f"{name}.svg", pe_svg.standalone(svg))
    save(out / "report.html", f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<title>Positional encodings on {escape(subject)}</title>
<style>{PAGE}{pe_svg.css()}</style></head><body>
{chr(10).join(parts)}
</body></html>
""")
