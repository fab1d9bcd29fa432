"""pe_stats.py - the statistics of the laboratory: spread over seeds, paired differences, ranks.

Two runs with one seed have the same initial weights and see the same windows in the same order, so
what a seed does to both cancels in their difference. Compared are therefore differences seed by
seed (a paired t test, Student 1908), never two means with a spread each.
"""
import math
import statistics

# 97.5 % quantiles of Student's t for 1, 2, ... 30 degrees of freedom (NIST/SEMATECH e-Handbook of
# Statistical Methods, 1.3.6.7.2). Beyond 30 the last is used, at most 5 % too wide.
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
        2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
        2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def mean_sd(values):
    """Mean and standard deviation (n - 1); of one value there is no deviation, None."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def paired(a, b):
    """Difference a - b of two {seed: loss} over the n seeds that both have.

    Returns the mean difference, and half the width of its 95 % interval, t(n - 1) sd / sqrt(n);
    what n does not allow is None.
    """
    differences = [a[seed] - b[seed] for seed in sorted(a) if seed in b]
    n = len(differences)
    if not n:
        return None, None
    mean, sd = mean_sd(differences)
    return mean, None if sd is None else T975[min(n - 1, len(T975)) - 1] * sd / math.sqrt(n)


def told_apart(a, b):
    """Whether the 95 % interval of the paired difference excludes 0; with 1 seed there is none."""
    mean, half = paired(a, b)
    return half is not None and abs(mean) > half


def significant_ranks(losses):
    """{name: {seed: loss}} -> [(name, rank)], best mean first.

    Being inside the noise is not transitive: a may be like b and b like c though a differs from c.
    So the rule is about boundaries: between two neighbours of the order a new rank begins only if
    every encoding above it is told apart from every one below it. Then any two that are not told
    apart share a rank, whatever stands between them. A rank is 1 + the number of encodings above
    its group. With one seed nothing is told apart and there is no rank, None.
    """
    order = sorted(losses, key=lambda name: (statistics.fmean(losses[name].values()), name))
    if max(map(len, losses.values())) < 2:
        return [(name, None) for name in order]
    result, rank = [], 1
    for i, name in enumerate(order):
        if all(told_apart(losses[a], losses[b]) for a in order[:i] for b in order[i:]):
            rank = i + 1
        result.append((name, rank))
    return result


def fractional_ranks(values):
    """{name: value} -> {name: rank}: 1 is the largest, and equal ones share the mean of theirs."""
    def rank(value):
        larger = sum(other > value for other in values.values())
        equal = sum(other == value for other in values.values())
        return larger + (1 + equal) / 2
    return {name: rank(value) for name, value in values.items()}


def with_spread(value, spread, digits, sign=""):
    """"1.234 ± 0.056"; without a spread the value alone."""
    return f"{value:{sign}.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
