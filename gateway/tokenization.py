"""Texts and conversations to token ids, off the event loop and with its sizes checked first."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate, ChatTemplateError, Message
from gateway.config import TokenizationLimits
from service_kit.errors import UnavailableError
from service_kit.model_manifest import ModelFilesError
from service_kit.tokenizer_files import read_template_file, read_tokenizer_config, read_tokenizer_text, tokenizer_path

ResultT = TypeVar("ResultT")

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NORMALIZER_SLACK = 4
"""A normalizer may shorten a text (composition, stripped spaces); this is more than any known one does."""


class TextEncoder:
    """Tokenizer and chat template of one model directory or GGUF file. Immutable after loading; usable from several
    threads."""

    def __init__(self, model: Path) -> None:
        """Raises ModelFilesError, with the file and the reason."""
        try:
            self._tokenizer: Any = Tokenizer.from_str(read_tokenizer_text(model))
        except ModelFilesError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise ModelFilesError(f"{tokenizer_path(model)}: not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = read_tokenizer_config(model)
        self._template = _load_template(model, config, _special_tokens(config))
        longest = max((len(text.encode()) for text in self._tokenizer.get_vocab()), default=1)
        self.max_bytes_per_token = longest * (_NORMALIZER_SLACK if self._tokenizer.normalizer else 1)
        """A text of more than this times n bytes has more than n tokens."""

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids with the tokenizer's own leading special token: as tokenizer.json has it, whatever `add_bos_token` in
        tokenizer_config.json says (so does transformers)."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of the rendered conversation. The template writes its special tokens itself, so none is added: no second
        BOS. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        return tuple(self._tokenizer.encode(self._template.render(messages), add_special_tokens=False).ids)


class TokenizationPool:
    """Threads for encoding. Bounded: more waiting calls than the limit are refused, retryably."""

    def __init__(self, limits: TokenizationLimits) -> None:
        self._limits = limits
        self._executor = ThreadPoolExecutor(limits.num_threads, thread_name_prefix="tokenize")
        self._num_waiting = 0

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """`work()` in a thread. Raises UnavailableError when too many wait."""
        if self._num_waiting >= self._limits.max_waiting:
            raise UnavailableError("too many prompts wait to be encoded")
        self._num_waiting += 1
        future = self._executor.submit(work)
        future.add_done_callback(self._count_down_from_thread(asyncio.get_running_loop()))
        return await asyncio.wrap_future(future)

    def _count_down_from_thread(self, loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
        """Counts when the work is over, not when the caller leaves: an abandoned encoding still holds its thread."""

        def count_down() -> None:
            self._num_waiting -= 1

        def done(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(count_down)

        return done

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _load_template(model: Path, config: dict[str, Any], special_tokens: dict[str, str]) -> ChatTemplate | None:
    """`chat_template.jinja` outranks tokenizer_config.json; of several named templates "default" is taken."""
    source = read_template_file(model) or config.get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str):
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except ChatTemplateError as error:
        raise ModelFilesError(f"{model}: {error}") from error
