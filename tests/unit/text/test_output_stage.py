import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.text import Emission, OutputStage, StopMatch, StopRules, TokenTable
from service_kit.delta import EMPTY_CHAIN, Cursor, Delta, extend_chain, join
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

stop_strings = st.lists(
    st.one_of(
        st.sampled_from(["STOP", "ab", "aab", "aa", "한국어", "국", "\u200d", "👧S", "\ufffd", "b\ufffda", "a"]),
        st.text(alphabet="abSTOP한국\u200d\ufffd", min_size=1, max_size=5),
    ),
    max_size=3,
)
token_lists = st.lists(st.one_of(st.integers(0, len(VOCABULARY) - 1), st.just(END)), max_size=30)


def ids(*pieces: str) -> list[int]:
    return [VOCABULARY.index(piece.encode()) for piece in pieces]


def run(stage: OutputStage, token_ids: list[int]) -> tuple[Delta | None, StopMatch | None]:
    """Pushes until the end, then flushes, as an engine does."""
    deltas: list[Delta] = []
    stop = stage.stop
    for token_id in token_ids:
        if stop is not None:
            break
        emission = stage.push(token_id)
        deltas += [emission.delta] if emission.delta else []
        stop = emission.stop
    flushed = stage.flush().delta
    deltas += [flushed] if flushed else []
    return join(deltas), stop


def rules(*stop: str) -> StopRules:
    return StopRules(stop=stop, end_token_ids=frozenset({END}))


def first_complete_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the match begins that is complete first; the longest of several. By brute force."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@given(token_ids=token_lists, stops=stop_strings)
def test_the_text_is_the_decoded_bytes_up_to_the_first_match(token_ids, stops):
    delta, stop = run(OutputStage(TABLE, rules(*stops)), token_ids)
    upto = token_ids[: token_ids.index(END)] if END in token_ids else token_ids
    decoder = new_decoder("replace")
    whole = decoder.decode(b"".join(TABLE.bytes_of(token_id) for token_id in upto))
    match = first_complete_match(whole, stops)
    expected_end = StopMatch(matched_stop=None) if END in token_ids else None
    assert (delta.text if delta else "") == (whole if match is None else whole[: match[0]])
    assert stop == (expected_end if match is None else StopMatch(matched_stop=match[1]))


@given(token_ids=token_lists, stops=stop_strings)
def test_what_is_numbered_is_a_prefix_of_the_pushed_ids_with_its_chain(token_ids, stops):
    stage = OutputStage(TABLE, rules(*stops))
    delta, _ = run(stage, token_ids)
    numbered = delta.token_ids if delta else ()
    assert numbered == tuple(token_ids[: len(numbered)])
    assert stage.cursor == Cursor(sequence_number=len(numbered), chain=extend_chain(EMPTY_CHAIN, numbered))
    assert stage.num_generated == len(numbered)


@given(token_ids=token_lists, stops=stop_strings)
def test_a_resumed_output_is_the_uninterrupted_one_at_every_split(token_ids, stops):
    whole, stop = run(OutputStage(TABLE, rules(*stops)), token_ids)
    numbered = len(whole.token_ids) if whole else 0
    for split in range(numbered + 1):
        stage = OutputStage(TABLE, rules(*stops), prior_output=token_ids[:split])
        rest, rest_stop = run(stage, token_ids[split:])
        assert (rest.texts if rest else ()) == (whole.texts[split:] if whole else ())
        assert (rest.token_ids if rest else ()) == (whole.token_ids[split:] if whole else ())
        assert rest_stop == stop
        if rest is not None and whole is not None:
            assert (rest.first, rest.chain) == (split + 1, whole.chain)
            assert rest.prev_chain == extend_chain(EMPTY_CHAIN, token_ids[:split])


@given(token_ids=token_lists, stops=stop_strings)
def test_the_beginning_of_a_stop_string_is_never_emitted_undecided(token_ids, stops):
    stage = OutputStage(TABLE, rules(*stops))
    decoder = new_decoder("replace")
    emitted = whole = ""
    for token_id in token_ids:
        emission = stage.push(token_id)
        if emission.stop is not None:
            return
        emitted += emission.delta.text if emission.delta else ""
        whole += decoder.decode(TABLE.bytes_of(token_id))
        lengths = [length for stop in stops for length in range(1, len(stop) + 1) if whole.endswith(stop[:length])]
        assert whole.startswith(emitted)
        assert len(emitted) <= len(whole) - max(lengths, default=0)


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


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, {7, 9}), (True, {7})])
def test_ignore_eos_keeps_the_stop_ids(ignore_eos, expected):
    sampling = SamplingParams(max_output_tokens=1, stop_token_ids=(7,), ignore_eos=ignore_eos)
    assert StopRules.from_sampling(sampling, [9]).end_token_ids == expected
