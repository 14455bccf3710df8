"""The numbers of rows for which oneDNN is asked for a product: few, because it compiles code for each and keeps it.

They are the numbers with at most four binary digits before the zeros at their end, up to LARGEST_SIZE: each up to 16, then
eight between each power of two and the next, 56 in all. Rounding up costs less than an eighth more rows, and nothing up to
16 rows and at the usual token budgets.
"""

LARGEST_SIZE = 512
_NUM_DIGITS = 4


def round_up(num_rows: int) -> int:
    """The smallest size that holds `num_rows`, which is at most LARGEST_SIZE; no rows need none."""
    step = 1 << max(0, (num_rows - 1).bit_length() - _NUM_DIGITS)
    return -(-num_rows // step) * step
