import asyncio
import json
import threading
from pathlib import Path

import pytest

from gateway.chat_template import ChatTemplate, ChatTemplateError, Message
from gateway.config import TokenizationLimits
from gateway.model_registry import ModelRegistry
from gateway.tokenization import TextEncoder, TokenizationPool
from gpu_worker.artifacts.simulated_model import BOS_TOKEN_ID
from service_kit.errors import NotFoundError, UnavailableError
from service_kit.ids import TenantId
from service_kit.model_manifest import ModelFilesError
from state_store.model import PriorityClass
from state_store.tenants import Tenant
from tests.support.tiny_models import make_simulated_model

HELLO = [Message(role="user", content="hi")]
ANYBODY = Tenant(tenant_id=TenantId("t"), name="t", weight=1, max_class=PriorityClass.INTERACTIVE)


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(HELLO)


def test_a_template_gets_what_transformers_gives_it() -> None:
    assert render("{{ bos_token }}|{{ messages[0].role }}|{{ messages[0]['content'] }}", bos_token="B") == "B|user|hi"
    assert render("{% if add_generation_prompt %}\n  yes\n{% endif %}\nno") == "  yes\nno"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}") == "aFalse"
    assert render("{% set n = namespace(k=1) %}{% set n.k = 2 %}{{ n.k }}{{ tools }}{{ documents }}") == "2NoneNone"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ dict(a=1).a }}") == "1"


def test_a_template_that_refuses_the_conversation_says_why() -> None:
    with pytest.raises(ChatTemplateError, match="only one turn"):
        render("{{ raise_exception('only one turn') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ namespace(__init__=1) }}",
        "{{ missing.attribute }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_crash_the_gateway(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_template_that_is_no_template_is_refused_at_load() -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{% if %}", {})


def test_text_gets_the_leading_token_and_a_conversation_only_the_templates_own(tmp_path: Path) -> None:
    make_simulated_model(tmp_path)
    encoder = TextEncoder(tmp_path)
    assert encoder.encode_text("hi") == (BOS_TOKEN_ID, *b"hi")
    assert encoder.encode_chat(HELLO) == (BOS_TOKEN_ID, *b"user: hi\nassistant: ")


def test_a_template_file_outranks_the_one_in_the_config(tmp_path: Path) -> None:
    make_simulated_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert TextEncoder(tmp_path).encode_chat(HELLO) == tuple(b"x")


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    make_simulated_model(tmp_path)
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert TextEncoder(tmp_path).encode_chat(HELLO) == tuple(b"d")


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    make_simulated_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    encoder = TextEncoder(tmp_path)
    assert not encoder.has_chat_template
    with pytest.raises(ChatTemplateError):
        encoder.encode_chat(HELLO)


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", "{}"), ("tokenizer_config.json", "[")])
def test_broken_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    make_simulated_model(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelFilesError, match=name):
        TextEncoder(tmp_path)


async def test_waiting_encodings_are_bounded_and_an_abandoned_one_still_counts() -> None:
    pool = TokenizationPool(TokenizationLimits(num_threads=1, max_waiting=2))
    release = threading.Event()
    first = asyncio.create_task(pool.run(release.wait))
    second = asyncio.create_task(pool.run(lambda: 2))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await pool.run(lambda: 3)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(UnavailableError):
        await pool.run(lambda: 4)
    release.set()
    assert await second == 2
    assert await pool.run(lambda: 5) == 5
    pool.close()


async def test_the_registry_takes_up_changed_and_drops_removed_models(tmp_path: Path) -> None:
    registry = ModelRegistry(tmp_path)
    await registry.rescan()
    assert registry.models() == []
    make_simulated_model(tmp_path / "a", name="a", context_length=32)
    make_simulated_model(tmp_path / "b", name="b")
    await registry.rescan()
    assert [model.manifest.model for model in registry.models()] == ["a", "b"]
    before = registry.get("b", ANYBODY)
    make_simulated_model(tmp_path / "a", name="a", context_length=64)
    (tmp_path / "b" / "sluice-model.json").write_text("{")
    await registry.rescan()
    assert registry.get("a", ANYBODY).manifest.context_length == 64
    assert registry.get("b", ANYBODY) is before
    (tmp_path / "b" / "sluice-model.json").unlink()
    await registry.rescan()
    with pytest.raises(NotFoundError):
        registry.get("b", ANYBODY)


async def test_a_name_that_stands_twice_is_served_once(tmp_path: Path) -> None:
    make_simulated_model(tmp_path / "a", name="same", context_length=32)
    make_simulated_model(tmp_path / "b", name="same", context_length=64)
    registry = ModelRegistry(tmp_path)
    await registry.rescan()
    assert [model.manifest.context_length for model in registry.models()] == [32]
