"""pe_tasks.py - pe-bench --tasks: how each task of make-tasks is trained, and what is told of it.

As in Kazemnejad et al. 2023 (The Impact of Positional Encoding on Length Generalization in
Transformers) models are trained at short lengths and judged at up to twice as long ones by exact
match: the share of lines whose whole answer greedy generation gets right. What an encoding does
past the trained length says something only if it has learned the task within it.
"""
import collections
import statistics

from pe_report import Section, fixed, html_table, line_chart, line_table, page, paragraphs
from pe_stats import mean_sd

TRAINED, LONGEST = 20, 40    # symbols of a question
# The corpora of a task, for make-tasks. Short lines are trained more often: they teach what a task
# is, without which the long ones teach nothing for a long time.
LENGTHS = {"train": f"1-{TRAINED},1-6,1-6,1-6", "val": f"1-{TRAINED}",
           "far": f"{TRAINED + 1}-{LONGEST}"}
LINES = {"train": 60000, "val": 2000, "far": 2000}
FITTED = 0.95                # exact match within the trained length from which a task is learned
SHAPE = {"dim": 128, "layers": 2, "heads": 8, "batch": 8, "train": "--hidden 64"}
PASSES = 4                   # of a step; lines of like length share one

# What a task takes until four encodings or more have learned it, and what to look for.
Task = collections.namedtuple("Task", "steps lr see why")
TASKS = {
    "copy": Task(
        4000, 1e-3,
        "Every symbol of the answer stands as far back as the question is long.",
        "A longer question asks for a distance that was never trained, unless a model finds its "
        "place by the letters before it; then letters that occur twice lead it astray."),
    "reverse": Task(
        8000, 1e-3,
        "The first symbol of the answer stands next to the mark, and each one after it two further "
        "back.",
        "It begins with short distances at every length, so the answer to a long question breaks "
        "where it comes to those that were never trained, or at the start of the line."),
    "count": Task(
        800, 3e-3,
        "All symbols are the same, and the only thing to get right is when to stop.",
        "Nothing but position or number tells one symbol from the next, so what an encoding cannot "
        "count on, it cannot copy; exact is only who stops at the very length."),
    "recall": Task(
        4000, 1e-3,
        "Each key is copied from the end of the question, and its value stands behind the key.",
        "Distance should not matter: a value is a neighbour of its key, wherever that is. More "
        "pairs make it harder at any length."),
    "addition": Task(
        9000, 1e-3,
        "The answer repeats the question column by column, and adds the digit of the sum, which "
        "needs this column and the carry of the one before.",
        "Ten digits occur again and again, so content hardly tells where in the question the next "
        "column is: it must be counted or measured."),
    "index": Task(
        12000, 3e-3,
        "Each letter is copied from the end of the question, and its place from the start follows.",
        "All ten places were trained, and a longer line only moves them away from the end, where "
        "they are asked for: absolute positions have them at hand, distances must be counted on."),
}


def shares(by_length):
    """Exact match over all lines within the trained length, and over those past it or None."""
    result = []
    for some in ([row for row in by_length if row[0] <= TRAINED],
                 [row for row in by_length if row[0] > TRAINED]):
        lines = sum(n for _, n, _ in some)
        result.append(sum(n * exact for _, n, exact in some) / lines if lines else None)
    return result


def places(values):
    """{name: value} -> {name: place}, 1 is the largest; equal ones share the mean of theirs."""
    return {a: 1 + sum(v > values[a] for v in values.values())
            + sum(v == values[a] for name, v in values.items() if name != a) / 2 for a in values}


def collect(settings, runs, notes):
    """All that is told, from the results of finished runs."""
    of_task = collections.defaultdict(lambda: collections.defaultdict(dict))
    for r in runs:
        of_task[r["task"]][r["pos"]][r["seed"]] = shares(r["by_length"])
    tasks = [name for name in TASKS if name in of_task]
    names = list(dict.fromkeys(r["pos"] for r in runs))
    inside, beyond = {}, {}    # (name, task) -> values of the seeds
    for task in tasks:
        for name, of_seed in of_task[task].items():
            inside[name, task] = [first for first, _ in of_seed.values()]
            beyond[name, task] = [last for _, last in of_seed.values() if last is not None]
    fitted = {key: statistics.fmean(values) >= FITTED for key, values in inside.items()}
    return {"settings": settings, "runs": runs, "names": names, "tasks": tasks, "notes": notes,
            "seeds": sorted({r["seed"] for r in runs}), "inside": inside, "beyond": beyond,
            "fitted": fitted}


def tables(data):
    """(title, header, rows) for what was trained and for what is longer: percent, mean and
    deviation over the seeds, and over the tasks their mean and the mean rank."""
    result = []
    for title, kind in ((f"exact match in %, lengths up to {TRAINED}", "inside"),
                        (f"exact match in %, lengths {TRAINED + 1} to {LONGEST}", "beyond")):
        values = {key: v for key, v in data[kind].items() if v}
        names = data["names"]
        means = {key: statistics.fmean(v) for key, v in values.items()}
        of_task = {task: places({name: means[name, task] for name in names
                                 if (name, task) in means}) for task in data["tasks"]}
        rows = []
        for name in names:
            row = [name]
            for task in data["tasks"]:
                if (name, task) not in values:
                    row.append("–")
                    continue
                mean, sd = mean_sd(values[name, task])
                cell = f"{100 * mean:.0f}" + ("" if sd is None else f" ± {100 * sd:.0f}")
                row.append(cell if data["fitted"][name, task] else f"({cell})")
            own = [task for task in data["tasks"] if (name, task) in means]
            whole = len(own) == len(data["tasks"])
            mean = f"{100 * statistics.fmean(means[name, t] for t in own):.0f}" if whole else "–"
            rank = f"{statistics.fmean(of_task[t][name] for t in own):.1f}" if whole else "–"
            bracket = whole and not all(data["fitted"][name, t] for t in own)
            rows.append(row + [f"({v})" if bracket else v for v in (mean, rank)])
        result.append((title, ["encoding", *data["tasks"], "mean", "rank"], rows))
    return result


def explanation(data):
    """What the tables say and do not say, in paragraphs."""
    s = data["settings"]
    held, seeds = s["lines"]["val"], len(data["seeds"])
    learned = ", ".join(
        f"{task} by {sum(data['fitted'].get((name, task), False) for name in data['names'])}"
        for task in data["tasks"])
    return [
        f"Exact match: the share of {held:,} lines whose whole answer is right; lines of up to "
        f"{TRAINED} symbols of question are held out, as far as a length has lines that training "
        f"does not have, and longer ones are new. Mean{' ± sd' * (seeds > 1)} over {seeds} "
        f"seed{'s' * (seeds > 1)}.",
        f"In brackets: not learned, below {100 * FITTED:.0f} % within the trained length; what "
        f"such a model does past it says nothing of its encoding. Learned, of "
        f"{len(data['names'])} encodings: {learned}.",
        "–: the encoding has no positions there, and no rank. rank: the mean of its places among "
        "the encodings, task by task; no test of what is inside the noise.", *data["notes"]]


def sections(data):
    for name in data["tasks"]:
        series = {pos: {} for pos in data["names"]}
        for r in data["runs"]:
            for length, _, exact in r["by_length"] if r["task"] == name else ():
                series[r["pos"]].setdefault(length, []).append(exact)
        series = {pos: points for pos, points in series.items() if points}
        task = TASKS[name]
        # what is not learned is told so where its line is looked up
        shown = {pos if data["fitted"][pos, name] else f"({pos})": points
                 for pos, points in series.items()}
        chart = line_chart(data, f"{name}: exact match", series, "symbols of the question", log="",
                           mark=TRAINED + 0.5, ylabel="share of lines", y=(-0.05, 1.05))
        missing = [pos for pos in series if not data["fitted"][pos, name]]
        if missing:
            chart.note(f"not learned: {', '.join(missing)}")
        yield Section(name, task.see, task.why, [(f"task-{name}", chart.svg())],
                      *line_table(shown, "length", lambda v: fixed(v, 3)))


def write(out, data, save):
    """report.html and the SVG files; save(path, content) writes one."""
    lead = [html for title, *table in tables(data) for html in
            (*paragraphs([title]), html_table(*table))]
    page(out, data, "tasks: " + ", ".join(data["tasks"]),
         ("dim", "layers", "heads", "batch", "steps", "lr"),
         [*lead, *paragraphs(explanation(data))], sections(data), save)
