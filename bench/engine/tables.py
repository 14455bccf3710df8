"""Results of interleaved rounds as tables. Pure."""

import statistics
from collections.abc import Callable, Mapping, Sequence

Results = Mapping[tuple[str, str], Sequence[float]]
"""By contestant and workload: output tokens per second of each round; for "prompt" 1 / time to first token."""

START, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def ratio(results: Results, ours: tuple[str, str], theirs: tuple[str, str]) -> str | None:
    """Median, least and most of the rounds' ratios; None without a round that has both."""
    pairs = [a / b for a, b in zip(results.get(ours, ()), results.get(theirs, ()), strict=False)]
    if not pairs:
        return None
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"


def speed_table(results: Results, contestants: Sequence[str], workloads: Sequence[str]) -> list[str]:
    """Medians of what was measured."""

    def cell(contestant: str, workload: str) -> str:
        speeds = results.get((contestant, workload))
        if not speeds:
            return "–"
        median = statistics.median(speeds)
        return f"{1 / median:.2f} s" if workload == "prompt" else f"{median:.0f}"

    return _table("output tokens/s (prompt: time to first token)", contestants, workloads, cell)


def ratio_table(results: Results, ours: Sequence[str], peer: str, workloads: Sequence[str]) -> list[str]:
    """Ours against one peer, how many times as fast."""
    return _table(
        f"times as fast as {peer}",
        ours,
        workloads,
        lambda name, work: ratio(results, (name, work), (peer, work)) or "–",
    )


def replace_between(text: str, lines: Sequence[str]) -> str:
    """`text` with `lines` between the marks. Raises ValueError when it has none."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the marks {START} and {END} are missing")
    return before + "\n".join([START, "", *lines, "", END]) + after


def _table(title: str, rows: Sequence[str], columns: Sequence[str], cell: Callable[[str, str], str]) -> list[str]:
    head = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return head + [f"| {row} | {' | '.join(cell(row, column) for column in columns)} |" for row in rows]
