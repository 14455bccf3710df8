"""The reader against every mixture of late, lost and repeated news."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from gateway.streaming.reader import CursorBeyondEndError, Need, OutputMissingError, OutputReader
from service_kit.delta import ChainMismatchError, Cursor, Delta, extend_chain, make_delta, rest_after
from service_kit.ids import GenerationId
from state_store.delta_log.port import LogEnd, LogView, Push
from state_store.model import State

GENERATION = GenerationId("g")


def whole_output(num_tokens: int) -> Delta:
    return make_delta(
        after=Cursor(), token_ids=range(100, 100 + num_tokens), texts=[f"<{n}>" for n in range(num_tokens)]
    )


def cursor_in(output: Delta | None, position: int) -> Cursor:
    ids = output.token_ids[:position] if output else ()
    return Cursor(sequence_number=position, chain=extend_chain(0, ids))


def part(output: Delta, start: int, end: int) -> Delta:
    """Tokens start+1 to end."""
    return make_delta(
        after=cursor_in(output, start), token_ids=output.token_ids[start:end], texts=output.texts[start:end]
    )


def end_of(num_tokens: int, state: State = State.SUCCEEDED) -> LogEnd:
    return LogEnd(state=state, output_tokens=num_tokens, prompt_tokens=1, cached_prompt_tokens=0)


class World:
    """A generation that grows step by step, and what each source says about it."""

    def __init__(self, output: Delta, cuts: list[int], base: int) -> None:
        self.output = output
        self.cuts = cuts
        self.base = base
        self.num_steps = 0

    @property
    def deltas(self) -> list[Delta]:
        bounds = [self.base, *(cut for cut in self.cuts if cut > self.base)]
        made = [part(self.output, a, b) for a, b in pairwise(bounds)]
        return made[: self.num_steps]

    @property
    def end(self) -> Cursor:
        return self.deltas[-1].end if self.deltas else cursor_in(self.output, self.base)

    @property
    def is_over(self) -> bool:
        return self.end.sequence_number == self.output.last

    @property
    def terminal(self) -> LogEnd | None:
        return end_of(self.output.last) if self.is_over else None

    def view(self, after: int) -> LogView:
        return LogView(
            generation_id=GENERATION,
            is_present=True,
            attempt=1,
            base=cursor_in(self.output, self.base),
            end=self.end,
            deltas=tuple(delta for delta in self.deltas if delta.last > after),
            terminal=self.terminal,
        )

    def push(self) -> list[Push]:
        delta = self.deltas[-1]
        pushes = [Push(generation_id=GENERATION, attempt=1, end=delta.end, delta=delta)]
        if self.terminal:
            pushes.append(Push(generation_id=GENERATION, attempt=1, end=delta.end, terminal=self.terminal))
        return pushes

    def stored(self) -> Delta | None:
        if self.is_over:
            return self.output
        return part(self.output, 0, self.base) if self.base else None


class Interleaving:
    """One random order of growth, pushes (some lost, some twice), late views and reads."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        num_tokens = self.random.randint(1, 12)
        cuts = sorted({self.random.randint(1, num_tokens) for _ in range(self.random.randint(0, 6))} | {num_tokens})
        self.world = World(whole_output(num_tokens), cuts, base=self.random.randrange(num_tokens))
        self.start = self.random.randint(0, num_tokens)
        self.reader = OutputReader(cursor_in(self.world.output, self.start))
        self.inbox: list[Push | LogView] = []
        self.received: list[Delta] = []

    def run(self) -> None:
        for _ in range(300):
            if self.reader.need is Need.NOTHING:
                return
            if not self.world.is_over and self.random.random() < 0.5:
                self.grow()
            else:
                self.received += self.serve()

    def grow(self) -> None:
        self.world.num_steps += 1
        for push in self.world.push():
            self.inbox += [push] * self.random.randint(0, 2)
        if self.random.random() < 0.2:
            self.inbox.append(self.world.view(self.reader.cursor.sequence_number))

    def serve(self) -> list[Delta]:
        match self.reader.need:
            case Need.LOG:
                return self.reader.take_view(self.world.view(self.reader.cursor.sequence_number))
            case Need.STORED_OUTPUT:
                return self.reader.take_stored_output(self.world.stored())
            case Need.NEWS if self.inbox:
                item = self.inbox.pop(0)
                return self.reader.take_push(item) if isinstance(item, Push) else self.reader.take_view(item)
            case Need.NEWS if self.world.is_over:
                # What the silence check finds.
                return self.reader.take_view(self.world.view(self.reader.cursor.sequence_number))
        return []


@pytest.mark.parametrize("first_seed", range(0, 4000, 500))
def test_whatever_is_lost_repeated_or_late_the_reader_forwards_exactly_what_follows_its_cursor(
    first_seed: int,
) -> None:
    for seed in range(first_seed, first_seed + 500):
        case = Interleaving(seed)
        case.run()
        output = case.world.output
        assert case.reader.need is Need.NOTHING, seed
        numbers = [number for delta in case.received for number in range(delta.first, delta.last + 1)]
        assert numbers == list(range(case.start + 1, output.last + 1)), seed
        assert "".join(delta.text for delta in case.received) == "".join(output.texts[case.start :]), seed
        assert case.reader.cursor == output.end, seed


def test_a_push_that_continues_is_forwarded_and_one_behind_a_gap_sends_to_the_log() -> None:
    output = whole_output(6)
    reader = OutputReader(Cursor())
    reader.take_view(LogView(generation_id=GENERATION, is_present=True))
    (delta,) = reader.take_push(push_of(part(output, 0, 2)))
    assert (delta.last, reader.need) == (2, Need.NEWS)
    assert reader.take_push(push_of(part(output, 4, 6))) == []
    assert reader.need is Need.LOG


def test_a_push_that_announces_more_than_it_carries_sends_to_the_log() -> None:
    """The opening of an attempt and the end of a generation carry no tokens, only where the log ends."""
    output = whole_output(4)
    for terminal in (None, end_of(4)):
        reader = OutputReader(Cursor())
        reader.take_view(LogView(generation_id=GENERATION, is_present=True))
        assert reader.take_push(Push(generation_id=GENERATION, attempt=2, end=output.end, terminal=terminal)) == []
        assert reader.need is Need.LOG


def push_of(delta: Delta) -> Push:
    return Push(generation_id=GENERATION, attempt=1, end=delta.end, delta=delta)


def test_a_repeated_or_overlapping_push_adds_only_what_is_new() -> None:
    output = whole_output(6)
    reader = OutputReader(cursor_in(output, 3))
    reader.need = Need.NEWS
    assert reader.take_push(push_of(part(output, 0, 2))) == []
    assert [delta.text for delta in reader.take_push(push_of(part(output, 1, 5)))] == ["<3><4>"]


def test_another_output_behind_the_cursor_is_a_mismatch_wherever_it_is_seen() -> None:
    output, other = whole_output(4), make_delta(after=Cursor(), token_ids=[1, 2, 3, 4], texts=["a"] * 4)
    at_two = cursor_in(output, 2)
    view = LogView(generation_id=GENERATION, is_present=True, end=other.end, deltas=(other,))
    at_end = LogView(generation_id=GENERATION, is_present=True, end=cursor_in(other, 2))
    at_base = LogView(generation_id=GENERATION, is_present=True, base=cursor_in(other, 2), end=other.end)
    for look in (
        lambda reader: reader.take_view(view),
        lambda reader: reader.take_view(at_end),
        lambda reader: reader.take_view(at_base),
        lambda reader: reader.take_push(push_of(part(other, 2, 4))),
        lambda reader: reader.take_push(push_of(part(other, 0, 2))),
        lambda reader: reader.take_stored_output(other),
    ):
        with pytest.raises(ChainMismatchError):
            look(OutputReader(at_two))


def test_a_cursor_at_the_end_is_only_believed_after_it_was_compared() -> None:
    output = whole_output(3)
    end_push = Push(generation_id=GENERATION, attempt=1, end=Cursor(), terminal=end_of(3))
    reader = OutputReader(replace(output.end, chain=5))
    reader.take_view(LogView(generation_id=GENERATION, is_present=False))
    assert reader.need is Need.RECORD
    reader.take_push(end_push)
    assert reader.need is Need.STORED_OUTPUT
    with pytest.raises(ChainMismatchError):
        reader.take_stored_output(output)


def test_an_output_of_no_tokens_is_over_at_once() -> None:
    reader = OutputReader(Cursor())
    reader.take_view(LogView(generation_id=GENERATION, is_present=True, terminal=end_of(0, State.CANCELLED)))
    assert (reader.need, reader.end) == (Need.NOTHING, end_of(0, State.CANCELLED))


def test_a_final_end_before_the_cursor_is_refused_and_a_live_one_is_not() -> None:
    output = whole_output(3)
    reader = OutputReader(Cursor(sequence_number=5, chain=1))
    reader.take_view(LogView(generation_id=GENERATION, is_present=True, end=output.end))
    assert reader.need is Need.NEWS
    with pytest.raises(CursorBeyondEndError):
        reader.take_push(Push(generation_id=GENERATION, attempt=1, end=output.end, terminal=end_of(3)))


def test_output_that_nobody_has_any_more_is_missing_and_not_a_loop() -> None:
    reader = OutputReader(Cursor())
    reader.take_view(LogView(generation_id=GENERATION, is_present=False))
    reader.take_push(Push(generation_id=GENERATION, attempt=1, end=Cursor(), terminal=end_of(3)))
    with pytest.raises(OutputMissingError):
        reader.take_stored_output(None)


def test_a_log_that_lost_its_newest_part_is_waited_for_until_it_grows_past_the_cursor_again() -> None:
    output = whole_output(6)
    reader = OutputReader(cursor_in(output, 4))
    lost = LogView(generation_id=GENERATION, is_present=True, end=cursor_in(output, 2), deltas=())
    assert reader.take_view(lost) == []
    assert reader.need is Need.NEWS
    assert reader.take_push(push_of(part(output, 2, 3))) == []
    (delta,) = reader.take_push(push_of(part(output, 3, 6)))
    assert (delta.first, delta.last) == (5, 6)
    assert rest_after(reader.cursor, output) is None
