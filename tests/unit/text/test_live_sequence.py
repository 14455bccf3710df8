import pytest

from gpu_worker.engine.live_sequence import LiveSequence
from gpu_worker.engine.port import SequenceOutput, SequenceSpec
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.text import OutputStage, StopRules, TokenTable
from service_kit.delta import TokenLogprob, join
from service_kit.sampling import FinishReason, SamplingParams

TABLE = TokenTable([bytes([byte]) for byte in range(256)])
EOS = 300


def live_sequence(prior: bytes = b"", **sampling) -> LiveSequence:
    spec = SequenceSpec(
        sequence_id="s",
        prompt_token_ids=(1, 2),
        output_token_ids=tuple(prior),
        sampling=SamplingParams(**{"max_output_tokens": 6, "stop": ("xyz",), "logprobs": 0} | sampling),
        priority=0,
        nonce=0,
    )
    rules = StopRules.from_sampling(spec.sampling, [EOS])
    return LiveSequence(
        spec=spec,
        stage=OutputStage(TABLE, rules, prior_output=spec.output_token_ids),
        sequence=Sequence(
            sequence_id="s",
            token_ids=[*spec.prompt_token_ids, *spec.output_token_ids],
            num_prompt_tokens=2,
            max_total_tokens=8,
            priority=0,
        ),
        clock=lambda: 7.0,
        added=1.0,
    )


def push_all(live: LiveSequence, token_ids: list[int]) -> list[SequenceOutput]:
    """Token number n has log probability -n / 8."""
    outputs = [live.push(token_id, TokenLogprob(-live.next_position / 8)) for token_id in token_ids]
    return [output for output in outputs if output is not None]


@pytest.mark.parametrize(
    ("drawn", "sampling", "text", "reason", "matched_stop"),
    [
        ([*b"ab", EOS], {}, "ab", FinishReason.STOP, None),
        ([*b"axy", EOS], {}, "axy", FinishReason.STOP, None),
        ([*b"axy", 9], {"stop_token_ids": (9,)}, "axy", FinishReason.STOP, None),
        ([*b"abxyz"], {}, "ab", FinishReason.STOP, "xyz"),
        ([*b"abxyz"], {"include_stop": True}, "abxyz", FinishReason.STOP, "xyz"),
        ([*b"abcxyz"], {}, "abc", FinishReason.STOP, "xyz"),
        ([*b"abcdxy"], {}, "abcdxy", FinishReason.LENGTH, None),
        ([*"ab국가".encode()[:6]], {}, "ab국", FinishReason.LENGTH, None),
        ([*b"axyz"], {"min_output_tokens": 2, "max_output_tokens": 4}, "axyz", FinishReason.LENGTH, None),
    ],
)
def test_every_end_gives_ids_texts_and_log_probabilities_of_equal_length(drawn, sampling, text, reason, matched_stop):
    outputs = push_all(live_sequence(**sampling), drawn)
    delta = join(output.delta for output in outputs if output.delta is not None)
    count = len(delta.token_ids)
    assert delta.text == text
    assert delta.token_ids == tuple(drawn[:count])
    assert delta.logprobs == tuple(TokenLogprob(-number / 8) for number in range(1, count + 1))
    finish = outputs[-1].finish
    assert (finish.reason, finish.matched_stop, finish.output_tokens) == (reason, matched_stop, count)
    assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)


def test_a_cancelled_sequence_keeps_what_was_held_with_its_log_probabilities():
    live = live_sequence(prior=b"a")
    assert push_all(live, [*b"xy"]) == []
    output = live.cancel()
    assert (output.delta.first, output.delta.texts) == (2, ("x", "y"))
    assert output.delta.logprobs == (TokenLogprob(-0.25), TokenLogprob(-0.375))
    assert output.finish.reason is FinishReason.CANCELLED
    assert output.finish.output_tokens == 3


def test_without_log_probabilities_a_delta_has_none():
    assert live_sequence().push(ord("a")).delta.logprobs == ()


def test_end_tokens_are_banned_while_the_output_is_too_short_held_and_earlier_ones_counted():
    live = live_sequence(prior=b"a", min_output_tokens=3, stop_token_ids=(9,))
    assert live.stage.rules.banned_at(live.next_position) == {9, EOS}
    push_all(live, [*b"x"])
    assert live.stage.rules.banned_at(live.next_position) == {9, EOS}
    push_all(live, [*b"x"])
    assert live.stage.rules.banned_at(live.next_position) == frozenset()


def test_an_ignored_eos_is_never_banned():
    live = live_sequence(min_output_tokens=3, ignore_eos=True)
    assert live.stage.rules.banned_at(live.next_position) == frozenset()
