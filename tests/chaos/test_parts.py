"""The harness's own parts: plans, links, the append-only file, the statement of confidence, and what mutations replace."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.append_only import AppendOnlyFile
from tests.chaos.mutation import MUTATIONS, Mutation, PlantError, Replacement, plant
from tests.chaos.plan import DECK, STORE_DECK, FaultKind, Scale, draw_trial
from tests.chaos.proxy import Link
from tests.chaos.report import confidence, upper_bound

SCALE = Scale(lease_s=3.0)
ROOT = Path(__file__).parents[2]


def test_the_same_numbers_draw_the_same_trial() -> None:
    assert draw_trial(5, 17, SCALE) == draw_trial(5, 17, SCALE)
    assert draw_trial(5, 17, SCALE) != draw_trial(6, 17, SCALE)


@pytest.mark.parametrize("deck", [DECK, STORE_DECK], ids=["all", "stores"])
def test_every_deck_of_trials_has_each_of_its_faults(deck: tuple[FaultKind, ...]) -> None:
    kinds = [draw_trial(1, number, SCALE, deck).fault.kind for number in range(1, 2 * len(deck) + 1)]
    assert sorted(kinds[: len(deck)]) == sorted(kinds[len(deck) :]) == sorted(deck)


def test_every_fault_is_in_a_deck() -> None:
    assert {*DECK, *STORE_DECK} == set(FaultKind)


def test_only_a_trial_that_loses_log_and_worker_may_lose_output() -> None:
    decks = (DECK, STORE_DECK)
    plans = [
        draw_trial(seed, number, SCALE, deck).fault for seed in range(5) for number in range(1, 30) for deck in decks
    ]
    assert {plan.kind for plan in plans if plan.can_lose_output} == {FaultKind.FLUSH_AND_KILL}


def test_requests_of_a_trial_have_ids_of_their_own() -> None:
    ids = [reader.wish.request_id for number in (1, 11) for reader in draw_trial(1, number, SCALE).readers]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(("failed", "trials", "bound"), [(0, 200, 0.0149), (0, 1, 0.95), (1, 100, 0.0466), (3, 3, 1.0)])
def test_the_bound_is_that_of_clopper_and_pearson(failed: int, trials: int, bound: float) -> None:
    assert upper_bound(failed, trials) == pytest.approx(bound, abs=1e-4)


def test_the_statement_names_the_rule_of_three_only_without_failures() -> None:
    assert "fewer than 1.49%" in confidence(0, 200)
    assert "3/200" in confidence(0, 200)
    assert "3/" not in confidence(1, 200)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(100):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    made = Link("test", lambda: f"127.0.0.1:{port}")
    await made.start()
    yield made
    await made.stop()
    server.close()


async def _open(link: Link) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = link.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_link_passes_both_directions(link: Link) -> None:
    reader, writer = await _open(link)
    writer.write(b"there and back")
    assert await reader.readexactly(14) == b"there and back"
    writer.close()


async def test_a_cut_resets_connections_and_lets_new_ones_through(link: Link) -> None:
    reader, writer = await _open(link)
    writer.write(b"x")
    await reader.readexactly(1)
    link.cut()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    reader, writer = await _open(link)
    writer.write(b"y")
    assert await reader.readexactly(1) == b"y"
    writer.close()


async def test_what_is_held_up_passes_at_the_release_and_not_before(link: Link) -> None:
    reader, writer = await _open(link)
    writer.write(b"x")
    await reader.readexactly(1)
    link.hold()
    writer.write(b"late")
    held = asyncio.create_task(reader.readexactly(4))
    done, _ = await asyncio.wait([held], timeout=0.1)
    assert not done
    link.release()
    assert await held == b"late"
    writer.close()


async def test_a_hold_of_present_connections_lets_new_ones_through(link: Link) -> None:
    reader, writer = await _open(link)
    writer.write(b"x")
    await reader.readexactly(1)
    link.hold(holds_new=False)
    writer.write(b"x")
    other_reader, other_writer = await _open(link)
    other_writer.write(b"y")
    assert await other_reader.readexactly(1) == b"y"
    link.release()
    assert await reader.readexactly(1) == b"x"
    writer.close()
    other_writer.close()


async def test_the_append_only_file_is_cut_back_to_an_earlier_length(tmp_path: Path) -> None:
    directory = tmp_path / "appendonlydir"
    directory.mkdir()
    path = directory / "appendonly.aof.1.incr.aof"
    path.write_bytes(b"old")
    file = AppendOnlyFile(tmp_path)
    file.sample(now_s=10.0)
    path.write_bytes(b"old and new")
    file.sample(now_s=11.0)
    assert file.cut_back(0.5, now_s=11.2) == len(" and new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_planted_fault_still_has_its_place(mutation: Mutation, tmp_path: Path) -> None:
    for replacement in mutation.replacements:
        path = tmp_path / replacement.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / replacement.path).read_text())
    plant(tmp_path, mutation)
    assert all(r.old not in (tmp_path / r.path).read_text() for r in mutation.replacements)


def test_a_fault_without_a_place_is_not_planted_silently(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("something else")
    replacement = Replacement(path="a.py", old="the check", new="")
    mutation = Mutation(name="m", replacements=(replacement,), kinds=(), expected=frozenset())
    with pytest.raises(PlantError, match=r"a\.py"):
        plant(tmp_path, mutation)
