"""How long a step will take, learned from the steps before it. Pure.

    seconds = c0 + c1 * tokens + c2 * attended

where `attended` is the number of positions that all rows of the step attend to together. The coefficients are fitted by
least squares under the constraint that none is negative; older steps count exponentially less. Batches of one kind leave
some coefficients undetermined (a steady decode does not tell c0 from c1), so deviations from the previous coefficients
are penalised a little: what the data does not say stays as it was.
"""

from itertools import combinations
from math import isfinite

from gpu_worker.engine.sequence import StepPlan

_SIZE = 3
# The determined directions of normalised features have weights far above this, the others only rounding errors.
_STIFFNESS = 1e-4


def attended_positions(start: int, num_tokens: int) -> int:
    """Positions that `num_tokens` rows attend to which stand behind `start` others, each row itself included."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def attended_by(plan: StepPlan) -> int:
    """Positions that all rows of a plan attend to together."""
    attended = 0
    for planned in plan.sequences:  # a loop, because a call for each of the rows of a decode costs more than the sum
        num_tokens = len(planned.token_ids)
        attended += planned.start + 1 if num_tokens == 1 else attended_positions(planned.start, num_tokens)
    return attended


class StepCost:
    """The model of step seconds; fitted when asked, so that observing is cheap."""

    def __init__(self, *, forgetting: float = 0.98) -> None:
        if not 0 < forgetting <= 1:
            raise ValueError("forgetting must be above 0 and at most 1")
        self._forgetting = forgetting
        self._weight = 0.0
        self._scales = [1.0] * _SIZE
        self._products = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._targets = [0.0] * _SIZE
        self._coefficients = [0.0] * _SIZE
        self._is_fitted = False

    def observe(self, *, tokens: int, attended: int, seconds: float) -> None:
        """Learns from one step. Raises ValueError for seconds that cannot be."""
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds must be finite and not negative, not {seconds}")
        features = (1.0, float(tokens), float(attended))
        self._weight = self._weight * self._forgetting + 1
        for row, feature in enumerate(features):
            self._scales[row] = max(self._scales[row], feature)
            self._targets[row] = self._targets[row] * self._forgetting + feature * seconds
            products = self._products[row]
            for column, other in enumerate(features):
                products[column] = products[column] * self._forgetting + feature * other
        self._is_fitted = False

    def predict(self, *, tokens: int, attended: int) -> float | None:
        """Expected seconds of a step; None before the first observation."""
        if self._weight == 0:
            return None
        if not self._is_fitted:
            self._fit()
        c0, c1, c2 = self._coefficients
        return c0 + c1 * tokens + c2 * attended

    def _fit(self) -> None:
        """Non-negative least squares: of all subsets of coefficients that are not 0, the best feasible one."""
        scales, indices = self._scales, range(_SIZE)
        stiffness = _STIFFNESS * self._weight
        matrix = [[self._products[i][j] / (scales[i] * scales[j]) for j in indices] for i in indices]
        vector = [self._targets[i] / scales[i] + stiffness * self._coefficients[i] * scales[i] for i in indices]
        for i in indices:
            matrix[i][i] += stiffness
        best, best_gain = [0.0] * _SIZE, 0.0
        for size in range(1, _SIZE + 1):
            for subset in combinations(indices, size):
                solution = _solve([[matrix[i][j] for j in subset] + [vector[i]] for i in subset])
                gain = sum(value * vector[i] for value, i in zip(solution, subset, strict=True))
                if min(solution) >= 0 and gain > best_gain:
                    best, best_gain = [0.0] * _SIZE, gain
                    for value, i in zip(solution, subset, strict=True):
                        best[i] = value
        self._coefficients = [value / scale for value, scale in zip(best, scales, strict=True)]
        self._is_fitted = True


def _solve(rows: list[list[float]]) -> list[float]:
    """Solves a positive definite system given as rows of coefficients and right-hand side, by elimination."""
    size = len(rows)
    for pivot in range(size):
        for lower in range(pivot + 1, size):
            factor = rows[lower][pivot] / rows[pivot][pivot]
            rows[lower] = [a - factor * b for a, b in zip(rows[lower], rows[pivot], strict=True)]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return solution
