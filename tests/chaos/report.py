"""What a run amounts to: numbers, their meaning, and the remains of a trial that failed."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.oracle import Kind, count_kinds, failures
from tests.chaos.stack import LogLine
from tests.chaos.trial import TrialResult

_CONFIDENCE = 0.95


@dataclass(slots=True)
class Tally:
    """Sums over the trials of one run."""

    seed: int
    engine: str
    lease_s: float
    num_trials: int = 0
    num_failed: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    num_attempts: int = 0
    num_visits: int = 0
    num_restarts: int = 0
    took_s: float = 0.0
    longest_pause_s: float = 0.0
    longest_pause_trial: int = 0
    longest_first_token_s: float = 0.0
    pause_s_by_fault: dict[str, float] = field(default_factory=dict)
    """The longest pause of any stream, per kind of fault."""
    faults: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    failed: list[dict[str, Any]] = field(default_factory=list)
    stalls: list[str] = field(default_factory=list)
    """Takeovers that had to wait for the old owner."""
    swept: list[str] = field(default_factory=list)
    """What was wrong in the whole database after the last trial."""

    def add(self, result: TrialResult) -> None:
        history = result.history
        self.num_trials += 1
        self.num_accepted += len(result.accepted)
        self.num_tokens += sum(row.output_tokens for row in history.generations)
        self.num_attempts += len(history.attempts)
        self.num_visits += len(history.visits)
        self.num_restarts += result.deaths
        self.took_s += result.took_s
        self.faults[result.plan.fault.kind.value] += 1
        self.findings.update(count_kinds(result.findings))
        kind, pause_s = result.plan.fault.kind.value, result.longest_pause_s
        self.pause_s_by_fault[kind] = round(max(pause_s, self.pause_s_by_fault.get(kind, 0.0)), 3)
        if pause_s > self.longest_pause_s:
            self.longest_pause_s, self.longest_pause_trial = pause_s, result.plan.number
        waits = [visit.first_token_s for visit in history.visits if visit.first_token_s is not None]
        self.longest_first_token_s = max([self.longest_first_token_s, *waits])
        self.stalls += [f"trial {result.plan.number}: {text}" for text in result.stalls]
        bad = failures(result.findings)
        if bad:
            self.num_failed += 1
            texts = [f"{finding.kind} {finding.request_id}: {finding.text}" for finding in bad]
            self.failed.append({"trial": result.plan.number, "fault": result.plan.fault.kind, "findings": texts})

    @property
    def is_good(self) -> bool:
        return self.num_failed == 0 and not self.swept

    def to_dict(self) -> dict[str, Any]:
        numbers = {key: value for key, value in _fields(self).items() if key not in ("faults", "findings")}
        found = {kind.value: self.findings.get(kind.value, 0) for kind in Kind}
        return {
            **numbers,
            "faults": dict(sorted(self.faults.items())),
            "findings": found,
            "confidence": confidence(self.num_failed, self.num_trials),
        }


def _fields(tally: Tally) -> dict[str, Any]:
    return {name: getattr(tally, name) for name in Tally.__slots__}


def upper_bound(num_failed: int, num_trials: int, confidence_level: float = _CONFIDENCE) -> float:
    """Clopper-Pearson upper bound of the failure probability of a trial; for no failures it is 1 - 0.05^(1/n), which the
    rule of three puts at 3/n."""
    if num_failed >= num_trials:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        likely = sum(
            math.comb(num_trials, k) * middle**k * (1 - middle) ** (num_trials - k) for k in range(num_failed + 1)
        )
        low, high = (middle, high) if likely > 1 - confidence_level else (low, middle)
    return high


def confidence(num_failed: int, num_trials: int) -> str:
    """The run's statement in one sentence."""
    if num_trials == 0:
        return "no trial was run"
    bound = upper_bound(num_failed, num_trials)
    rule = f"; rule of three: 3/{num_trials}" if num_failed == 0 else ""
    return f"{num_failed} of {num_trials} trials failed: with 95 % confidence fewer than {bound:.2%} of trials do{rule}"


def summary(tally: Tally) -> str:
    """For a person."""
    found = {kind.value: tally.findings.get(kind.value, 0) for kind in Kind}
    rows = [
        ("trials", f"{tally.num_trials}, seed {tally.seed}, engine {tally.engine}, lease {tally.lease_s:g} s"),
        ("time", f"{tally.took_s:.0f} s, {tally.took_s / max(1, tally.num_trials):.1f} s per trial"),
        ("faults", ", ".join(f"{kind} {number}" for kind, number in sorted(tally.faults.items()))),
        ("accepted", f"{tally.num_accepted} requests, {tally.num_attempts} attempts"),
        ("streamed", f"{tally.num_tokens} tokens in {tally.num_visits} streams"),
        ("lost", found["LOST"]),
        ("gaps, duplicates", f"{found['GAP']}, {found['DUPLICATE']}"),
        ("oracle mismatches", found["MISMATCH"]),
        ("not terminal", found["NOT_TERMINAL"]),
        ("changed after end", found["CHANGED_AFTER_END"]),
        ("double charges", f"{found['DOUBLE_CHARGE']}, not charged {found['NOT_CHARGED']}"),
        ("two generations", found["TWO_GENERATIONS"]),
        ("foreign grants", found["FOREIGN_GRANT"]),
        ("failures told", found["FAILURE"]),
        ("data loss", f"{found['DATA_LOSS']} not permitted, {found['PERMITTED_DATA_LOSS']} permitted and proven"),
        ("longest pause", f"{tally.longest_pause_s:.1f} s (trial {tally.longest_pause_trial})"),
        ("by fault", ", ".join(f"{kind} {s:.1f}" for kind, s in sorted(tally.pause_s_by_fault.items()))),
        ("stalled takeovers", len(tally.stalls)),
        ("first token", f"after at most {tally.longest_first_token_s:.1f} s"),
        ("database afterwards", "; ".join(tally.swept) or "nothing wrong"),
        ("ended by itself", f"{tally.num_restarts} processes"),
        ("result", confidence(tally.num_failed, tally.num_trials)),
    ]
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


def write_result(directory: Path, tally: Tally) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "result.json"
    path.write_text(json.dumps(tally.to_dict(), indent=2, default=str) + "\n")
    return path


def write_remains(directory: Path, result: TrialResult, lines: Sequence[LogLine]) -> None:
    """Plan, findings, what the clients saw, the rows, and what every process logged during the trial."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = {
        "plan": asdict(result.plan),
        "findings": [asdict(finding) for finding in result.findings],
        "notes": result.notes,
        "visits": [asdict(visit) for visit in result.history.visits],
        "rows": result.rows.raw,
    }
    for name, part in parts.items():
        (directory / f"{name}.json").write_text(json.dumps(part, indent=1, default=_plain) + "\n")
    (directory / "log.txt").write_text("".join(_log_lines(lines, result.began_s)))


def _log_lines(lines: Iterable[LogLine], began_s: float) -> Iterable[str]:
    for line in lines:
        if line.at_s >= began_s:
            yield f"{line.at_s - began_s:8.3f} {line.process:<13} {line.text}\n"


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
