"""pe_tasks.py - pe-bench --tasks: how each task of make-tasks is trained, and what is told of it.

As in Kazemnejad et al. 2023 (The Impact of Positional Encoding on Length Generalization in
Transformers) models are trained at short lengths and judged at up to twice as long ones by exact
match: the share of lines whose whole answer greedy generation gets right. What an encoding does
past the trained length says something only if it has learned the task within it.
"""
import collections
import statistics

from pe_report import Section, fixed, line_chart, line_table
from pe_stats import fractional_ranks, mean_sd, with_spread

TRAINED, LONGEST = 20, 40    # symbols of a question
# The corpora of a task, for make-tasks. Short lines are trained more often: they teach what a task
# is, without which the long ones teach nothing for a long time.
LENGTHS = {"train": f"1-{TRAINED},1-6,1-6,1-6", "val": f"1-{TRAINED}",
           "far": f"{TRAINED + 1}-{LONGEST}"}
LINES = {"train": 60000, "val": 2000, "far": 2000}
FITTED = 0.95                # exact match within the trained length from which a task is learned
SHAPE = {"dim": 128, "layers": 2, "heads": 8, "batch": 8, "train": "--hidden 64"}
PASSES = 4                   # of a step; lines of like length share one
SETTINGS = ("dim", "layers", "heads", "batch", "steps", "lr")    # what the page tells

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


def collect(settings, runs, notes):
    """All that is told, from the results of finished runs."""
    inside, beyond = collections.defaultdict(list), collections.defaultdict(list)
    for r in runs:    # (name, task) -> values of the seeds
        first, last = shares(r["by_length"])
        inside[r["pos"], r["task"]].append(first)
        if last is not None:
            beyond[r["pos"], r["task"]].append(last)
    found = {task for _, task in inside}
    return {"settings": settings, "runs": runs, "notes": notes,
            "names": list(dict.fromkeys(name for name, _ in inside)),
            "tasks": [task for task in TASKS if task in found],
            "seeds": sorted({r["seed"] for r in runs}), "inside": inside, "beyond": beyond,
            "fitted": {key: statistics.fmean(v) >= FITTED for key, v in inside.items()}}


def percent(values):
    """Mean and deviation."""
    return with_spread(*mean_sd([100 * v for v in values]), 0) if values else "–"


def bracketed(data, name, tasks, cell):
    return cell if all(data["fitted"][name, task] for task in tasks) else f"({cell})"


def tables(data):
    """(title, header, rows) for what was trained and for what is longer: percent, mean and
    deviation over the seeds, and over the tasks their mean and the mean rank."""
    result = []
    for title, kind in ((f"exact match in %, lengths up to {TRAINED}", "inside"),
                        (f"exact match in %, lengths {TRAINED + 1} to {LONGEST}", "beyond")):
        means = {task: {name: statistics.fmean(values) for name in data["names"]
                        if (values := data[kind].get((name, task)))} for task in data["tasks"]}
        ranks = {task: fractional_ranks(of_name) for task, of_name in means.items()}
        rows = []
        for name in data["names"]:
            measured = [task for task in data["tasks"] if name in means[task]]
            row = [name] + [
                bracketed(data, name, [task], percent(data[kind][name, task]))
                if task in measured else "–" for task in data["tasks"]]
            if measured == data["tasks"]:
                mean = f"{100 * statistics.fmean(means[task][name] for task in measured):.0f}"
                rank = f"{statistics.fmean(ranks[task][name] for task in measured):.1f}"
                row += [bracketed(data, name, measured, cell) for cell in (mean, rank)]
            else:
                row += ["–", "–"]
            rows.append(row)
        result.append((title, ["encoding", *data["tasks"], "mean", "rank"], rows))
    return result


def page_table(data):
    """Header and rows of the table for a page: "within / beyond", without deviations of 0."""
    def cell(name, task):
        if (name, task) not in data["inside"]:
            return "–"
        both = (percent(data[kind].get((name, task))) for kind in ("inside", "beyond"))
        return bracketed(data, name, [task],
                         " / ".join(part.removesuffix(" ± 0") for part in both))
    return ["`--pos`", *data["tasks"]], [
        [f"`{name}`", *(cell(name, task) for task in data["tasks"])] for name in data["names"]]


def subject(data):
    return "tasks: " + ", ".join(data["tasks"])


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
    for task in data["tasks"]:
        series = {name: collections.defaultdict(list) for name in data["names"]
                  if (name, task) in data["inside"]}
        for r in data["runs"]:
            for length, _, exact in r["by_length"] if r["task"] == task else ():
                series[r["pos"]][length].append(exact)
        # what is not learned is told so where its line is looked up
        shown = {bracketed(data, name, [task], name): points for name, points in series.items()}
        chart = line_chart(data, f"{task}: exact match", series, "symbols of the question", log="",
                           mark=TRAINED + 0.5, ylabel="share of lines", y=(-0.05, 1.05))
        missing = [name for name in series if not data["fitted"][name, task]]
        if missing:
            chart.note(f"not learned: {', '.join(missing)}")
        yield Section(task, TASKS[task].see, TASKS[task].why, [(f"task-{task}", chart.svg())],
                      *line_table(shown, "length", lambda v: fixed(v, 3)))
