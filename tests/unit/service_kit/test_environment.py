from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from service_kit.environment import Environment, EnvironmentVariableError


def test_values_are_read_as_their_types() -> None:
    environment = Environment(
        {"TEXT": " a ", "INT": "7", "SECONDS": "0.5", "FLAG": "yes", "LIST": "a, b,,c", "PATH_": "/x", "EMPTY": " "}
    )
    assert environment.text("TEXT") == "a"
    assert environment.integer("INT", 1, minimum=0, maximum=9) == 7
    assert environment.seconds(
        "SECONDS", timedelta(0), minimum=timedelta(0), maximum=timedelta(seconds=1)
    ) == timedelta(milliseconds=500)
    assert environment.boolean("FLAG", default=False) is True
    assert environment.texts("LIST") == ("a", "b", "c")
    assert environment.path("PATH_") == Path("/x")
    assert environment.optional_text("EMPTY") is None


def test_unset_and_empty_variables_take_the_default() -> None:
    environment = Environment({"EMPTY": ""})
    for name in ("EMPTY", "UNSET"):
        assert environment.text(name, "d") == "d"
        assert environment.integer(name, 3, minimum=0, maximum=9) == 3
        assert environment.boolean(name, default=True) is True
        assert environment.texts(name, ("x",)) == ("x",)
        assert environment.optional_path(name) is None


@pytest.mark.parametrize(
    "read",
    [
        lambda environment: environment.text("MISSING"),
        lambda environment: environment.texts("MISSING"),
        lambda environment: environment.path("MISSING"),
        lambda environment: environment.integer("WORD", 1, minimum=0, maximum=9),
        lambda environment: environment.integer("BIG", 1, minimum=0, maximum=9),
        lambda environment: environment.number("WORD", 1, minimum=0, maximum=9),
        lambda environment: environment.number("NAN", 1, minimum=0, maximum=9),
        lambda environment: environment.boolean("WORD", default=True),
        lambda environment: environment.choice("WORD", "a", ("a", "b")),
    ],
)
def test_a_bad_variable_is_named_in_the_error(read: Callable[[Environment], object]) -> None:
    with pytest.raises(EnvironmentVariableError) as caught:
        read(Environment({"WORD": "word", "BIG": "10", "NAN": "nan"}))
    assert caught.value.name in {"MISSING", "WORD", "BIG", "NAN"}
    assert caught.value.name in str(caught.value)
