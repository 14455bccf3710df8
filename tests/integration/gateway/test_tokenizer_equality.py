"""The gateway's tokenization against transformers', which it must not import."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.chat_template import Message
from gateway.tokenization import TextEncoder
from tests.support.tiny_models import make_simulated_model

TEXTS = [
    "The capital of France is",
    " leading and trailing ",
    "line\n\nbreaks\tand\r\ntabs",
    "Zürich, 東京, 🇫🇷 👩‍👩‍👧 é",
    "123456789 3.14 1e-9",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return {'a': [1, 2]}\n",
    "\x00\u200b\ufeff",
    "a" * 3000,
]
CHATS = [
    [("user", "What is the capital of France?")],
    [("system", "Be brief."), ("user", " hi "), ("assistant", "Hello!"), ("user", "<|im_end|> & <b>'\"")],
    [("user", ""), ("assistant", "\n"), ("user", "東京 🇫🇷")],
]
TEMPLATES = [
    """{% for message in messages %}
      {% if loop.first %}[{{ bos_token }}]{% endif %}
        {{- message.role | upper }}: {{ message['content'] | trim }}
    {% endfor %}
    {%- if add_generation_prompt %}A:{% endif %}""",
    "{% for m in messages %}{{ m | tojson }}{% if not loop.last %}{% continue %}{% endif %}{{ eos_token }}{% endfor %}",
    """{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
    {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ ns.n }}{{ tools is none }}{{ documents }}""",
]


@pytest.fixture(scope="module")
def auto_tokenizer() -> Any:
    # Loaded here: importing it costs seconds, and only these tests need it.
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer


def assert_equal(directory: Path, auto_tokenizer: Any) -> None:
    theirs, ours = auto_tokenizer.from_pretrained(directory), TextEncoder(directory)
    for text in TEXTS:
        assert list(ours.encode_text(text)) == theirs(text)["input_ids"], text
    for chat in CHATS:
        conversation = [{"role": role, "content": content} for role, content in chat]
        expected = theirs.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
        assert list(ours.encode_chat([Message(role=role, content=content) for role, content in chat])) == expected


@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_a_small_tokenizer_gives_the_same_ids(
    tmp_path: Path, auto_tokenizer: Any, template: str | None, add_bos_token: bool | None
) -> None:
    make_simulated_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    path = tmp_path / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    if template is not None:
        fields["chat_template"] = template
    if add_bos_token is not None:
        fields["add_bos_token"] = add_bos_token
    path.write_text(json.dumps(fields))
    assert_equal(tmp_path, auto_tokenizer)


@pytest.mark.model
@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_smollm2s_tokenizer_gives_the_same_ids(
    tmp_path: Path, smollm2: Path, auto_tokenizer: Any, template: str | None
) -> None:
    directory = smollm2
    if template is not None:
        directory = tmp_path
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (directory / name).write_text((smollm2 / name).read_text())
        (directory / "chat_template.jinja").write_text(template)
    assert_equal(directory, auto_tokenizer)
