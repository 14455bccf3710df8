"""One of the three forms of input to prompt token ids."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.chat_template import ChatTemplateError, Message
from gateway.model_registry import ServedModel
from gateway.tokenization import TokenizationPool
from gateway.validation import check_prompt_length, parse_token_ids, prompt_too_long
from inference.v1 import types_pb2
from service_kit.errors import InternalError, InvalidArgumentError
from service_kit.telemetry import tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextInput:
    """A text or conversation whose size is checked, and how to encode it."""

    field: str
    encode: Callable[[], tuple[int, ...]]


class HasTextInput(Protocol):
    """GenerationSpec and TokenizeRequest."""

    @property
    def prompt(self) -> str: ...
    @property
    def chat(self) -> types_pb2.Chat: ...


class PromptEncoder:
    """Encodes prompts in threads. Sizes in bytes are checked first: a prompt that cannot fit is never encoded."""

    def __init__(self, pool: TokenizationPool, *, max_prompt_bytes: int) -> None:
        self._pool = pool
        self._max_prompt_bytes = max_prompt_bytes

    async def encode_spec(self, spec: types_pb2.GenerationSpec, model: ServedModel) -> tuple[int, ...]:
        """Prompt of a generation: not empty, and with room for one token behind it. Raises InvalidArgumentError."""
        form = spec.WhichOneof("input")
        if form == "token_ids":
            return parse_token_ids(spec.token_ids, model)
        field, token_ids = await self._encode(form, spec, model, "spec.")
        check_prompt_length(field, len(token_ids), model)
        return token_ids

    async def encode_text(self, form: str | None, source: HasTextInput, model: ServedModel) -> tuple[int, ...]:
        """As `encode_spec`, for the two forms of text, whatever the length in tokens."""
        _, token_ids = await self._encode(form, source, model, "")
        return token_ids

    async def _encode(
        self, form: str | None, source: HasTextInput, model: ServedModel, path: str
    ) -> tuple[str, tuple[int, ...]]:
        text_input = self._check_text(form, source, model, path)
        with tracer().start_as_current_span("gateway.tokenize") as span:
            try:
                token_ids = await self._pool.run(text_input.encode)
            except ChatTemplateError as error:
                raise InvalidArgumentError(text_input.field, str(error)) from error
            span.set_attribute("prompt_tokens", len(token_ids))
        if not token_ids:
            raise InvalidArgumentError(text_input.field, "encodes to no tokens")
        if max(token_ids) >= model.manifest.vocab_size:
            raise InternalError(f"the tokenizer of {model.manifest.model} gives ids beyond the model's vocabulary")
        return text_input.field, token_ids

    def _check_text(self, form: str | None, source: HasTextInput, model: ServedModel, path: str) -> _TextInput:
        match form:
            case "prompt":
                return self._check_prompt(source.prompt, model, f"{path}prompt")
            case "chat":
                return self._check_chat(source.chat, model, f"{path}chat")
            case _:
                raise InvalidArgumentError(f"{path}input", "must be set")

    def _check_prompt(self, text: str, model: ServedModel, field: str) -> _TextInput:
        if not text:
            raise InvalidArgumentError(field, "must not be empty")
        self._check_bytes(field, len(text.encode()), model)
        return _TextInput(field=field, encode=lambda: model.encoder.encode_text(text))

    def _check_chat(self, chat: types_pb2.Chat, model: ServedModel, field: str) -> _TextInput:
        if not chat.messages:
            raise InvalidArgumentError(f"{field}.messages", "must not be empty")
        if not model.encoder.has_chat_template:
            raise InvalidArgumentError(field, "this model has no chat template")
        if len(chat.messages) > model.manifest.context_length:
            raise prompt_too_long(f"{field}.messages", "more messages than the model's context has tokens", model)
        messages = [Message(role=message.role, content=message.content) for message in chat.messages]
        for index, message in enumerate(messages):
            if not message.role:
                raise InvalidArgumentError(f"{field}.messages[{index}].role", "must not be empty")
        self._check_bytes(field, sum(len((m.role + m.content).encode()) for m in messages), model)
        return _TextInput(field=field, encode=lambda: model.encoder.encode_chat(messages))

    def _check_bytes(self, field: str, num_bytes: int, model: ServedModel) -> None:
        limit = min(self._max_prompt_bytes, model.manifest.context_length * model.encoder.max_bytes_per_token)
        if num_bytes > limit:
            raise prompt_too_long(field, f"{num_bytes} bytes; this model takes at most {limit}", model)
