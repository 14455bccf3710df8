"""What a real model must say: what it said undisturbed, up to near-ties."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from service_kit.delta import Cursor
from sluice.client import SluiceClient
from sluice.client_events import Finished, Output, Sampling
from tests.chaos.oracle import Execution, Predictions
from tests.chaos.plan import TEMPERATURES, Scale

NEAR_TIE = 1e-3
"""A first difference is allowed where the undisturbed run's two best log probabilities are closer than this."""

_CUT_OFF = "\N{REPLACEMENT CHARACTER}"
"""What stands for the beginning of a character when an output ends inside it."""

Key = tuple[str, float, int]
"""(prompt, temperature, seed)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One undisturbed output. `text_by_length` is the text of its first n tokens, for every n at which an event ended."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    """Distance of the two best log probabilities at each position."""
    text_by_length: Mapping[int, str]


def key_of(text: str, temperature: float, seed: int) -> Key:
    return text, round(temperature, 3), seed


def real_predictions(references: Mapping[Key, Reference]) -> Predictions:
    """Predictions for requests whose key is among `references` and which ask for no more tokens than these have."""

    def find(execution: Execution) -> Reference:
        return references[key_of(execution.wish.text, execution.row.temperature, execution.row.seed)]

    def check_tokens(execution: Execution, token_ids: Sequence[int], can_lose_output: bool) -> str | None:
        reference = find(execution)
        place = first_difference(token_ids, reference)
        if place is None or reference.gaps[place] < NEAR_TIE:
            return None
        return (
            f"token {place + 1} of {len(token_ids)} is not that of the undisturbed run, whose two best log probabilities"
            f" are {reference.gaps[place]:.2e} apart"
        )

    def check_text(execution: Execution, token_ids: Sequence[int], text: str) -> str | None:
        reference = find(execution)
        known = reference.text_by_length.get(len(token_ids))
        if known is None or text.rstrip(_CUT_OFF) == known or first_difference(token_ids, reference) is not None:
            return None
        return f"the stored text ({len(text)} characters) is not that of the undisturbed run ({len(known)})"

    return Predictions(tokens=check_tokens, text=check_text)


def first_difference(token_ids: Sequence[int], reference: Reference) -> int | None:
    """Index of the first token that the reference does not have there."""
    pairs = enumerate(zip(token_ids, reference.token_ids, strict=False))
    different = next((place for place, (left, right) in pairs if left != right), None)
    is_longer = len(token_ids) > len(reference.token_ids)
    return len(reference.token_ids) - 1 if different is None and is_longer else different


async def run_undisturbed(client: SluiceClient, model: str, scale: Scale) -> dict[Key, Reference]:
    """References for everything that trials of this scale may ask for, one after another."""
    references = {}
    for text, temperature, seed in product(scale.prompts, TEMPERATURES, scale.seeds):
        sampling = Sampling(
            temperature=temperature, seed=seed, max_output_tokens=scale.num_tokens[1], ignore_eos=True, logprobs=2
        )
        references[key_of(text, temperature, seed)] = await _run_one(client, model, text, sampling)
    return references


async def _run_one(client: SluiceClient, model: str, text: str, sampling: Sampling) -> Reference:
    token_ids: list[int] = []
    gaps: list[float] = []
    text_by_length: dict[int, str] = {}
    said, cursor = "", Cursor()
    async for event in client.generate(model, text, sampling=sampling):
        if isinstance(event, Output):
            token_ids += event.token_ids
            said += event.text
            gaps += [entry.top[0].logprob - entry.top[1].logprob for entry in event.logprobs]
            cursor = event.cursor
            text_by_length[cursor.sequence_number] = said
        elif isinstance(event, Finished):
            assert event.output_tokens == len(token_ids) == len(gaps)
    return Reference(token_ids=tuple(token_ids), gaps=tuple(gaps), text_by_length=text_by_length)
