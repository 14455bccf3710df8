import pytest

from sluice.commands.database import find_dsn
from sluice.errors import UserError


def test_a_database_is_named_by_the_option_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_POSTGRES_DSN", "postgresql://env/a")
    assert find_dsn(None) == "postgresql://env/a"
    assert find_dsn("host=option dbname=b") == "host=option dbname=b"


@pytest.mark.parametrize("text", ["secret", "postgresql://user:secret@[::1/db", "host=h password='secret", "secret=1"])
def test_what_names_no_database_is_told_without_what_may_be_a_password(text: str) -> None:
    with pytest.raises(UserError, match="give a libpq URL") as refused:
        find_dsn(text)
    assert "secret" not in str(refused.value)
