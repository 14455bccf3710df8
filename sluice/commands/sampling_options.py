"""One command line option per sampling parameter, for every command that generates."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, get_type_hints

import typer

from sluice.client_events import Sampling
from sluice.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The options as typer reads them; what is not given is left to the server's default."""

    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest output, tokens.")] = None
    min_output_tokens: Annotated[int | None, typer.Option(min=0, help="No stop before so many tokens.")] = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None
    top_p: Annotated[float | None, typer.Option(help="Smallest set of tokens with this much probability.")] = None
    top_k: Annotated[int | None, typer.Option(help="Only the k most probable tokens.")] = None
    min_p: Annotated[
        float | None,
        typer.Option(help="Only tokens with this share of the most probable one's probability; e.g. --min-p 0.05."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Against tokens of prompt and output; 1 is off, e.g. --repetition-penalty 1.1."),
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Against tokens of the output, -2 to 2; e.g. --presence-penalty 0.5.")
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="Against tokens of the output, each time anew, -2 to 2; e.g. --frequency-penalty 0.5."),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS",
            help="Added to the logit of a token, -100 to 100; may be repeated, e.g. --logit-bias 42=-100.",
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same output.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None
    include_stop: Annotated[bool, typer.Option("--include-stop", help="End behind the stop text instead.")] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Show the log probability of every token, and so many of the most probable ones, 0 to 20;"
            " e.g. --logprobs 3.",
        ),
    ] = None

    def to_sampling(self) -> Sampling:
        """Raises UserError for a bias that is none."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_parse_biases(self.logit_bias or ()),
            seed=self.seed,
            max_output_tokens=self.max_tokens,
            min_output_tokens=self.min_output_tokens,
            stop=tuple(self.stop or ()),
            include_stop=self.include_stop,
            logprobs=self.logprobs,
        )


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these options in place of its parameter `sampling`, which gets what they say."""
    hints = get_type_hints(SamplingOptions, include_extras=True)
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(SamplingOptions)
    ]
    own = [each for each in inspect.signature(command).parameters.values() if each.name != "sampling"]

    @wraps(command)
    def run(**arguments: object) -> None:
        chosen = SamplingOptions(**{each.name: arguments.pop(each.name) for each in options})  # type: ignore[arg-type]
        command(**arguments, sampling=chosen.to_sampling())

    parameters = [*own, *options]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parse_biases(texts: Iterable[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            number, value = int(token_id), float(bias)
        except ValueError:
            raise UserError(f"--logit-bias {text}: is not ID=BIAS, for example 42=-100") from None
        if number in biases:
            raise UserError(f"--logit-bias {text}: token {number} has a bias already")
        if not 0 <= number < 1 << 32:
            raise UserError(f"--logit-bias {text}: {number} is no token id")
        biases[number] = value
    return biases
