"""Pearson's chi-square test."""

import math


def survival(statistic, degrees):
    """Probability that a chi-square variable of so many degrees of freedom exceeds `statistic`.

    The regularised upper incomplete gamma function: by its series below the mean, by its continued fraction above
    (Numerical Recipes, 6.2).
    """
    shape, value = degrees / 2, statistic / 2
    if value <= 0:
        return 1.0
    scale = math.exp(-value + shape * math.log(value) - math.lgamma(shape))
    if value < shape + 1:
        term = total = 1 / shape
        for step in range(1, 10000):
            term *= value / (shape + step)
            total += term
            if term < total * 1e-15:
                break
        return 1 - total * scale
    tiny = 1e-300
    base = value + 1 - shape
    ratio, inverse = 1 / tiny, 1 / base
    fraction = inverse
    for step in range(1, 10000):
        factor = -step * (step - shape)
        base += 2
        inverse = 1 / (factor * inverse + base or tiny)
        ratio = base + factor / ratio or tiny
        fraction *= inverse * ratio
        if abs(inverse * ratio - 1) < 1e-15:
            break
    return scale * fraction


def p_value(counts, probabilities, *, least_expected=5.0):
    """How probable counts at least as far from `probabilities` are; cells of small expectation are taken together.

    A count where the probability is 0 gives 0.
    """
    num_draws = sum(counts.values())
    if any(probabilities.get(cell, 0) == 0 for cell in counts):
        return 0.0
    cells, rest_count, rest_expected = [], 0, 0.0
    for cell, probability in probabilities.items():
        expected = probability * num_draws
        if expected >= least_expected:
            cells.append((counts.get(cell, 0), expected))
        else:
            rest_count += counts.get(cell, 0)
            rest_expected += expected
    if rest_expected >= least_expected:
        cells.append((rest_count, rest_expected))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return survival(statistic, len(cells) - 1)
