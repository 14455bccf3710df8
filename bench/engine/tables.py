"""What was measured as tables of the page. Pure."""

import statistics
from collections.abc import Sequence

from bench.engine.rounds import Samples, describe, ratios, series
from bench.figures import Figure

START, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def speed_table(samples: Samples, workloads: Sequence[str]) -> list[str]:
    """Medians: output tokens a second; for "prompt" the time to the first token."""
    names = [name for name in dict.fromkeys(name for name, _ in samples) if not name.startswith("bound")]
    lines = [
        f"| output tokens/s (prompt: time to first token) | {' | '.join(workloads)} |",
        "|---" * (len(workloads) + 1) + "|",
    ]
    return lines + [f"| {name} | {' | '.join(_speed(samples, name, work) for work in workloads)} |" for name in names]


def bound_table(samples: Samples, precisions: Sequence[str]) -> list[str]:
    """Decode steps against what they cannot be faster than."""
    lines = [
        "| decode step | step / bound | step, ms | bound, ms | of it fastest products | of it KV |",
        "|---" * 6 + "|",
    ]
    for precision in precisions:
        for workload in ("32", "64"):
            steps = series(samples, f"alone {precision}", workload, "step_ms")
            bounds = series(samples, f"bound {precision}", workload, "bound_ms")
            if not steps or not bounds:
                continue
            kv_ms = statistics.median(series(samples, f"bound {precision}", workload, "kv_ms"))
            middle = [statistics.median(steps), statistics.median(bounds), statistics.median(bounds) - kv_ms, kv_ms]
            shown = " | ".join(f"{figure:.1f}" for figure in middle)
            lines.append(f"| {precision}, {workload} | {describe(ratios(steps, bounds))} | {shown} |")
    return lines if len(lines) > 2 else []  # noqa: PLR2004 - the head


def figure_table(figures: Sequence[Figure]) -> list[str]:
    """Each figure with its limit; for ratios the least and the most of the rounds."""
    lines = ["| figure | measured | limit | kept | |", "|---" * 5 + "|"]
    for figure in figures:
        limits = [
            f"{sign} {limit:g}" for sign, limit in (("≥", figure.at_least), ("≤", figure.at_most)) if limit is not None
        ]
        kept = "yes" if figure.is_kept else "no"
        lines.append(f"| {figure.name} | {figure.value:.4g} | {', '.join(limits)} | {kept} | {figure.note} |")
    return lines


def replace_between(text: str, lines: Sequence[str]) -> str:
    """`text` with `lines` between the marks. Raises ValueError when it has none."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the marks {START} and {END} are missing")
    return before + "\n".join([START, "", *lines, "", END]) + after


def _speed(samples: Samples, name: str, workload: str) -> str:
    if workload == "prompt":
        seconds = series(samples, name, workload, "wall_s")
        return f"{statistics.median(seconds):.2f} s" if seconds else "–"
    rates = series(samples, name, workload, "output_tokens_per_s")
    return f"{statistics.median(rates):.0f}" if rates else "–"
