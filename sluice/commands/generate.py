"""`sluice generate` and `sluice chat`: talk to a running service."""

import asyncio
import uuid
from typing import Annotated

import typer

from sluice.answer import Answer, read_or_cancel
from sluice.client import ClientSettings, SluiceClient
from sluice.client_events import Input, Message, Sampling
from sluice.commands.access import client_settings, local_model
from sluice.commands.sampling_options import with_sampling_options
from sluice.console import say, write_text
from sluice.errors import UserError
from sluice.home import find_home

Target = Annotated[str | None, typer.Option(help="Gateway address(es), host:port; default: the local stack.")]
Key = Annotated[str | None, typer.Option(help="API key; default: SLUICE_API_KEY, else the local stack's.")]
CaCert = Annotated[
    str | None,
    typer.Option(
        help="Speak TLS and trust this PEM file, or 'system'; default: SLUICE_CA_CERT, else as the local stack does."
    ),
]
Model = Annotated[str | None, typer.Option(help="Model; default: the one that the local stack runs, or its first.")]
System = Annotated[str | None, typer.Option(help="System message.")]
RequestId = Annotated[str | None, typer.Option(help="Idempotency key: the same one continues the same generation.")]
PriorityClass = Annotated[str, typer.Option("--class", help="interactive, standard or batch.")]


@with_sampling_options
def generate_command(
    prompt: Annotated[str, typer.Argument(help="The question, or with --raw plain text to continue.")],
    *,
    model: Model = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the plain text, without the chat template.")] = False,
    system: System = None,
    sampling: Sampling,
    request_id: RequestId = None,
    priority_class: PriorityClass = "interactive",
    target: Target = None,
    api_key: Key = None,
    ca_cert: CaCert = None,
) -> None:
    """Ask a model, and stream the answer to stdout; the statistics go to stderr."""
    source: Input = prompt if raw else _conversation(system, Message(role="user", content=prompt))
    settings = client_settings(find_home(), target=target, api_key=api_key, ca_cert=ca_cert)
    asking = ask(
        settings,
        _require_model(model),
        source,
        sampling=sampling,
        priority_class=priority_class,
        request_id=request_id,
    )
    answer = asyncio.run(asking)
    write_text("\n")
    for line in (*answer.describe_logprobs(), *answer.describe()):
        say(line)


@with_sampling_options
def chat_command(
    *,
    model: Model = None,
    system: System = None,
    sampling: Sampling,
    target: Target = None,
    api_key: Key = None,
    ca_cert: CaCert = None,
) -> None:
    """Talk to a model; an empty line or Ctrl-D ends it, Ctrl-C ends an answer."""
    settings = client_settings(find_home(), target=target, api_key=api_key, ca_cert=ca_cert)
    name = _require_model(model)
    messages = _conversation(system)
    while True:
        try:
            line = input("> ")
        except EOFError:
            break
        if not line.strip():
            break
        question = Message(role="user", content=line)
        try:
            answer = asyncio.run(ask(settings, name, [*messages, question], sampling=sampling))
        except KeyboardInterrupt:
            write_text("\n")
            continue
        write_text("\n")
        for line in (*answer.describe_logprobs(), "; ".join(answer.describe())):
            say(line)
        messages += [question, Message(role="assistant", content=answer.text)]


async def ask(
    settings: ClientSettings,
    model: str,
    source: Input,
    *,
    sampling: Sampling,
    priority_class: str = "interactive",
    request_id: str | None = None,
) -> Answer:
    """Stream one answer to stdout. Raises SluiceError."""
    identity = request_id or str(uuid.uuid4())
    async with SluiceClient(settings) as client:
        events = client.generate(model, source, sampling=sampling, request_id=identity, priority_class=priority_class)
        return await read_or_cancel(client, events, identity, write=write_text, notice=say)


def _conversation(system: str | None, *messages: Message) -> list[Message]:
    return [*([Message(role="system", content=system)] if system else []), *messages]


def _require_model(model: str | None) -> str:
    name = model or local_model(find_home())
    if name is None:
        raise UserError("name the model with --model")
    return name
