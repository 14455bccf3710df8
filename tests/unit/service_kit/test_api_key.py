import hmac

import pytest

from service_kit import api_key
from service_kit.api_key import mint_api_key, parse_api_key


def test_a_key_proves_itself_by_its_hash_and_by_nothing_else() -> None:
    text, minted = mint_api_key()
    presented = parse_api_key(text)
    other = parse_api_key(text[:-1] + ("a" if text[-1] != "a" else "b"))
    assert presented == minted
    assert other is not None
    assert other.prefix == minted.prefix
    assert presented.is_proven_by(minted.key_hash)
    assert not other.is_proven_by(minted.key_hash)
    assert not presented.is_proven_by(b"")


def test_hashes_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    fake = type("Hmac", (), {"compare_digest": staticmethod(compare)})
    monkeypatch.setattr(api_key, "hmac", fake)
    _, minted = mint_api_key()
    assert minted.is_proven_by(minted.key_hash)
    assert not minted.is_proven_by(b"other")
    assert compared == [(minted.key_hash, minted.key_hash), (minted.key_hash, b"other")]


def test_neither_key_nor_hash_is_shown() -> None:
    text, minted = mint_api_key()
    shown = repr(minted) + str(minted)
    assert minted.prefix in shown
    assert text.rsplit("-", 1)[-1] not in shown
    assert repr(minted.key_hash) not in shown


def test_keys_are_never_alike() -> None:
    minted = [mint_api_key() for _ in range(100)]
    assert len({text for text, _ in minted}) == len({it.prefix for _, it in minted}) == 100
