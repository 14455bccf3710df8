import codecs
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.text import Emission, OutputStage, StopMatch, StopRules, TokenTable
from service_kit.delta import EMPTY_CHAIN, Cursor, Delta, TokenLogprob, extend_chain, join
from service_kit.sampling import SamplingParams

new_decoder = codecs.getincrementaldecoder("utf-8")
PIECES = (
    *("a", "b", "ab", "ba", "aab", "한", "국어", "👩‍👩‍👧", "\u200d", "S", "TO", "STOP", " ", "xSTOPx"),
    *("STOPab", "éa", "\ufffd"),
)
VOCABULARY = [
    *(piece.encode() for piece in PIECES),
    *(bytes([byte]) for byte in "한👩".encode()),
    *(b"a\xed", b"\x95\x9cb", b"\xff", b"\xed\x95", b"", b"\xf0\x9f", b"\xe2\x80"),
]
TABLE = TokenTable(VOCABULARY)
BYTES = TokenTable([bytes([byte]) for byte in range(256)])
EMPTY = VOCABULARY.index(b"")
END = len(VOCABULARY) + 5


@dataclass(frozen=True)
class Case:
    """Tokens that a model draws, and what ends the output."""

    table: TokenTable
    token_ids: list[int]
    rules: StopRules
    has_logprobs: bool

    def logprobs(self) -> list[TokenLogprob | None]:
        """One that tells its position, per token."""
        return [TokenLogprob(-number / 8) if self.has_logprobs else None for number in range(len(self.token_ids))]

    def new_stage(self, num_prior: int = 0) -> OutputStage:
        return OutputStage(self.table, self.rules, prior_output=self.token_ids[:num_prior])


@st.composite
def cases(draw) -> Case:
    """Texts cut into tokens at any byte, with foreign tokens between, and stop strings that often stand in them."""
    text = draw(st.text(alphabet="abSTOP한👩\u200d\ufffd", max_size=24))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=len(data))) | {0, len(data)})
    vocabulary = [*VOCABULARY, *(data[left:right] for left, right in pairwise(cuts))]
    token_ids = list(range(len(VOCABULARY), len(vocabulary)))
    end_token_id = len(vocabulary) + draw(st.integers(-len(VOCABULARY), 5))
    foreign = st.one_of(st.integers(0, len(VOCABULARY) - 1), st.just(end_token_id))
    for position, token_id in draw(st.lists(st.tuples(st.integers(0, 30), foreign), max_size=6)):
        token_ids.insert(position, token_id)
    found = st.builds(
        lambda start, length: text[start : start + length], st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6)
    ).filter(bool)
    free = st.text(alphabet="abSTOP한\u200d\ufffd", min_size=1, max_size=5)
    stop = draw(st.lists(st.one_of(found, free) if text else free, max_size=4))
    rules = StopRules(
        stop=tuple(stop),
        end_token_ids=frozenset({end_token_id}),
        include_stop=draw(st.booleans()),
        min_output_tokens=draw(st.integers(0, 12)),
    )
    return Case(TokenTable(vocabulary), token_ids, rules, draw(st.booleans()))


def ids(*pieces: str) -> list[int]:
    return [VOCABULARY.index(piece.encode()) for piece in pieces]


def run(
    stage: OutputStage, token_ids: list[int], logprobs: list[TokenLogprob | None] | None = None
) -> tuple[Delta | None, StopMatch | None]:
    """Pushes until the end, then flushes, as an engine does."""
    deltas: list[Delta] = []
    stop = stage.stop
    for token_id, logprob in zip(token_ids, logprobs or [None] * len(token_ids), strict=True):
        if stop is not None:
            break
        emission = stage.push(token_id, logprob)
        deltas += [emission.delta] if emission.delta else []
        stop = emission.stop
    flushed = stage.flush().delta
    deltas += [flushed] if flushed else []
    return join(deltas), stop


def rules(*stop: str, **others) -> StopRules:
    return StopRules(stop=stop, end_token_ids=frozenset({END}), **others)


def token_texts(table: TokenTable, token_ids: list[int]) -> list[str]:
    """The text that each token adds: what decoding everything up to it gives beyond decoding everything before it."""
    wholes = [
        new_decoder("replace").decode(b"".join(table.bytes_of(token_id) for token_id in token_ids[:count]))
        for count in range(len(token_ids) + 1)
    ]
    return [right[len(left) :] for left, right in pairwise(wholes)]


def first_complete_match(text: str, stops: tuple[str, ...], start: int) -> tuple[int, int, str] | None:
    """Begin, end and string of the match that is complete first; the longest of several. By brute force."""
    for end in range(start + 1, len(text) + 1):
        complete = [stop for stop in stops if text[start:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), end, longest
    return None


def whole_output(case: Case) -> tuple[list[str], StopMatch | None]:
    """Texts of the numbered tokens and the end, from the whole text at once."""
    rules, minimum = case.rules, case.rules.min_output_tokens
    ends = [n for n, token_id in enumerate(case.token_ids) if n >= minimum and token_id in rules.end_token_ids]
    upto = case.token_ids[: ends[0]] if ends else case.token_ids
    texts = token_texts(case.table, upto)
    match = first_complete_match("".join(texts), rules.stop, len("".join(texts[:minimum])))
    if match is None:
        return texts, StopMatch(matched_stop=None) if ends else None
    begin, end, matched_stop = match
    cut, deciding = (end, end - 1) if rules.include_stop else (begin, begin)
    position, numbered = 0, []
    for text in texts:
        if position + len(text) > deciding and position >= cut:
            break
        numbered.append(text[: cut - position])
        position += len(text)
        if position > deciding:
            break
    return numbered, StopMatch(matched_stop=matched_stop)


@settings(max_examples=400)
@given(case=cases())
def test_a_streamed_output_is_that_of_the_whole_text(case):
    delta, stop = run(case.new_stage(), case.token_ids, case.logprobs())
    texts, expected_stop = whole_output(case)
    assert list(delta.texts if delta else ()) == texts
    assert stop == expected_stop
    assert list(delta.token_ids if delta else ()) == case.token_ids[: len(texts)]
    assert list(delta.logprobs if delta else ()) == (case.logprobs()[: len(texts)] if case.has_logprobs else [])


@given(case=cases())
def test_what_is_numbered_is_a_prefix_of_the_pushed_ids_with_its_chain(case):
    stage = case.new_stage()
    delta, _ = run(stage, case.token_ids, case.logprobs())
    numbered = delta.token_ids if delta else ()
    assert numbered == tuple(case.token_ids[: len(numbered)])
    assert stage.cursor == Cursor(sequence_number=len(numbered), chain=extend_chain(EMPTY_CHAIN, numbered))
    assert stage.num_generated == len(numbered)
    assert len(numbered) >= min(case.rules.min_output_tokens, len(case.token_ids))


@given(case=cases())
def test_a_resumed_output_is_the_uninterrupted_one_at_every_split(case):
    whole, stop = run(case.new_stage(), case.token_ids, case.logprobs())
    for split in range((len(whole.token_ids) if whole else 0) + 1):
        stage = case.new_stage(split)
        rest, rest_stop = run(stage, case.token_ids[split:], case.logprobs()[split:])
        assert (rest.texts if rest else ()) == (whole.texts[split:] if whole else ())
        assert (rest.token_ids if rest else ()) == (whole.token_ids[split:] if whole else ())
        assert (rest.logprobs if rest else ()) == (whole.logprobs[split:] if whole else ())
        assert rest_stop == stop
        if rest is not None and whole is not None:
            assert (rest.first, rest.chain) == (split + 1, whole.chain)
            assert rest.prev_chain == extend_chain(EMPTY_CHAIN, case.token_ids[:split])


@given(case=cases())
def test_exactly_what_may_belong_to_a_match_is_held_back(case):
    """All other tokens are numbered at once; the beginning of a stop string is never emitted undecided."""
    rules = case.rules
    beginnings = [stop[:length] for stop in rules.stop for length in range(1, len(stop) + 1)]
    stage = case.new_stage()
    texts = token_texts(case.table, case.token_ids)
    free = len("".join(texts[: rules.min_output_tokens]))
    emitted = 0
    for count, token_id in enumerate(case.token_ids, start=1):
        emission = stage.push(token_id)
        if emission.stop is not None:
            return
        emitted += len(emission.delta.token_ids) if emission.delta else 0
        whole = "".join(texts[:count])
        undecided = max((len(part) for part in beginnings if whole[free:].endswith(part)), default=0)
        decided = len(whole) if rules.include_stop else len(whole) - undecided
        lengths = [len("".join(texts[:number])) for number in range(1, count + 1)]
        assert emitted == sum(length <= decided for length in lengths)


def test_a_token_that_ends_inside_a_character_has_no_text_and_the_next_has_it_all():
    stage = OutputStage(BYTES, StopRules())
    texts = [stage.push(byte).delta.text for byte in "가a".encode()]
    assert texts == ["", "", "가", "a"]


def test_an_incomplete_character_at_the_end_adds_no_text():
    delta, _ = run(OutputStage(BYTES, StopRules()), [0x61, 0xED, 0x95])
    assert delta.texts == ("a", "", "")


def test_invalid_bytes_become_replacement_characters():
    delta, _ = run(OutputStage(BYTES, StopRules()), [0xFF, 0xED, 0x61])
    assert delta.texts == ("\ufffd", "", "\ufffda")


def test_an_end_token_is_not_numbered_and_releases_what_was_held():
    stage = OutputStage(TABLE, rules("STOP"))
    assert stage.push(ids("S")[0]) == Emission()
    emission = stage.push(END)
    assert emission.delta.texts == ("S",)
    assert emission.stop == StopMatch(matched_stop=None)
    assert stage.num_generated == 1


def test_a_token_with_text_before_the_match_is_numbered_with_its_text_cut():
    delta, stop = run(OutputStage(TABLE, rules("STOP")), ids("a", "xSTOPx", "b"))
    assert delta.texts == ("a", "x")
    assert stop == StopMatch(matched_stop="STOP")


def test_tokens_of_a_match_are_never_numbered():
    delta, stop = run(OutputStage(TABLE, rules("STOP")), ids("a", "S", "TO", "b"))
    assert delta.texts == ("a", "S", "TO", "b")
    assert stop is None
    delta, stop = run(OutputStage(TABLE, rules("STO")), ids("a", "S", "TO"))
    assert delta.texts == ("a",)
    assert stop == StopMatch(matched_stop="STO")


def test_tokens_without_text_are_numbered_only_before_the_token_in_which_the_match_begins():
    tokens = [*ids("a"), EMPTY, *ids("S"), EMPTY, *ids("TO")]
    delta, _ = run(OutputStage(TABLE, rules("STO")), tokens)
    assert delta.texts == ("a", "")


def test_a_resume_behind_a_cut_token_ends_at_once():
    stage = OutputStage(TABLE, rules("STOP"), prior_output=ids("a", "xSTOPx"))
    assert stage.stop == StopMatch(matched_stop="STOP")
    assert stage.push(ids("a")[0]) == Emission(stop=StopMatch(matched_stop="STOP"))
    assert stage.num_generated == 2


def test_a_match_that_begins_in_logged_text_numbers_nothing_more():
    stage = OutputStage(TABLE, rules("ab"), prior_output=ids("a"))
    assert stage.push(ids("b")[0]) == Emission(stop=StopMatch(matched_stop="ab"))
    assert stage.cursor.sequence_number == 1


def test_held_tokens_count_as_generated():
    stage = OutputStage(TABLE, rules("STOP"), prior_output=ids("a"))
    stage.push(ids("S")[0])
    assert (stage.cursor.sequence_number, stage.num_generated) == (1, 2)
    assert stage.flush().delta.texts == ("S",)


def test_an_included_stop_string_ends_the_text_and_its_tokens_are_numbered_at_once():
    stage = OutputStage(TABLE, rules("STOP", include_stop=True))
    texts = [stage.push(token_id).delta.texts for token_id in ids("a", "S", "TO")]
    assert texts == [("a",), ("S",), ("TO",)]
    stage = OutputStage(TABLE, rules("STOP", include_stop=True), prior_output=ids("a"))
    emission = stage.push(*ids("xSTOPx"))
    assert emission.delta.texts == ("xSTOP",)
    assert emission.stop == StopMatch(matched_stop="STOP")


@pytest.mark.parametrize("include_stop", [False, True])
def test_the_match_that_is_complete_first_counts_though_a_longer_one_could_follow(include_stop):
    delta, stop = run(OutputStage(TABLE, rules("TOP", "STO", include_stop=include_stop)), ids("a", "xSTOPx"))
    assert delta.texts == ("a", "xSTO" if include_stop else "x")
    assert stop == StopMatch(matched_stop="STO")


def test_log_probabilities_stay_with_held_tokens_and_vanish_with_dropped_ones():
    stage = OutputStage(TABLE, rules("STOP"))
    first, second, third = TokenLogprob(-0.5), TokenLogprob(-1.5, ((1, -0.25),)), TokenLogprob(-2.5)
    assert stage.push(*ids("S"), first) == Emission()
    released = stage.push(*ids("a"), second).delta
    assert (released.texts, released.logprobs) == (("S", "a"), (first, second))
    stage.push(*ids("S"), first)
    ended = stage.push(END, third)
    assert ended.delta.logprobs == (first,)
    stage = OutputStage(TABLE, rules("STO"))
    stage.push(*ids("a"), first)
    stage.push(*ids("S"), second)
    assert stage.push(*ids("TO"), third) == Emission(stop=StopMatch(matched_stop="STO"))


def test_log_probabilities_for_some_tokens_only_are_refused():
    stage = OutputStage(TABLE, rules("STOP"))
    stage.push(*ids("S"), TokenLogprob(-0.5))
    with pytest.raises(ValueError, match="log probabilities"):
        stage.push(*ids("a"))


def test_a_stop_string_counts_when_it_begins_behind_the_minimum():
    stage = OutputStage(TABLE, rules("ab", min_output_tokens=2))
    delta, stop = run(stage, ids("ab", "a", "b", "ba", "b", "a"))
    assert delta.texts == ("ab", "a", "b", "b")
    assert stop == StopMatch(matched_stop="ab")


def test_nothing_is_held_before_the_minimum():
    stage = OutputStage(TABLE, rules("STOP", min_output_tokens=1))
    assert stage.push(*ids("S")).delta.texts == ("S",)
    assert stage.push(*ids("S")) == Emission()


def test_an_end_token_before_the_minimum_is_an_ordinary_token():
    stage = OutputStage(TABLE, StopRules(end_token_ids=frozenset(ids("a")), min_output_tokens=1))
    assert stage.push(*ids("a")).delta.texts == ("a",)
    assert stage.push(*ids("a")) == Emission(stop=StopMatch(matched_stop=None))


def test_end_tokens_are_banned_up_to_the_minimum():
    sampling = SamplingParams(max_output_tokens=9, min_output_tokens=2, stop_token_ids=(7,))
    made = StopRules.from_sampling(sampling, [9])
    assert [made.banned_at(position) for position in (1, 2, 3)] == [{7, 9}, {7, 9}, frozenset()]


def test_sampling_parameters_decide_what_ends_an_output():
    sampling = SamplingParams(max_output_tokens=9, min_output_tokens=2, stop=("x",), include_stop=True)
    expected = StopRules(stop=("x",), end_token_ids=frozenset({3}), include_stop=True, min_output_tokens=2)
    assert StopRules.from_sampling(sampling, [3]) == expected


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, {7, 9}), (True, {7})])
def test_ignore_eos_keeps_the_stop_ids(ignore_eos, expected):
    sampling = SamplingParams(max_output_tokens=1, stop_token_ids=(7,), ignore_eos=ignore_eos)
    assert StopRules.from_sampling(sampling, [9]).end_token_ids == expected
