from datetime import UTC, datetime, timedelta

import pytest

from scheduler.retention import RetentionSettings, is_over
from service_kit.ids import new_generation_id
from state_store.retention_store import UnstoredTexts

END = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = RetentionSettings(log_kept=timedelta(seconds=600), shortest_kept=timedelta(seconds=15))


@pytest.mark.parametrize(
    ("grace_s", "last_watched_s", "kept_s"),
    [
        (30, None, 30),
        (30, -5, 30),  # watched last before the end
        (30, 20, 50),  # a reader left 20 s after the end
        (0, None, 15),  # its readers get the end
        (0, 10, 15),
        (3600, None, 600),  # not longer than the log
        (30, 599, 600),
        (None, None, 600),  # unlimited
    ],
)
def test_texts_go_when_the_grace_after_end_and_last_reader_is_over(
    grace_s: float | None, last_watched_s: float | None, kept_s: float
) -> None:
    grace = timedelta(seconds=grace_s) if grace_s is not None else None
    item = UnstoredTexts(generation_id=new_generation_id(), finished_at=END, grace=grace)
    watched = END + timedelta(seconds=last_watched_s) if last_watched_s is not None else None

    def over_after(seconds: float) -> bool:
        return is_over(item, watched, settings=SETTINGS, now=END + timedelta(seconds=seconds))

    assert [over_after(kept_s - 0.001), over_after(kept_s + 0.001)] == [False, True]


def test_who_reads_at_this_moment_keeps_the_texts_whatever_the_grace() -> None:
    item = UnstoredTexts(generation_id=new_generation_id(), finished_at=END, grace=timedelta(0))
    now = END + timedelta(seconds=100)
    assert not is_over(item, now, settings=SETTINGS, now=now)
