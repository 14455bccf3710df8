"""The form of API keys: `sk-sluice-<prefix>-<secret>`. Pure but for the random numbers of `mint_api_key`.

The store keeps prefix and hash, never the key. The secret has 256 random bits, so a plain SHA-256 is enough: there is
nothing to guess that a slow hash would protect.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

_SCHEME = "sk-sluice-"
_PREFIX_HEX_DIGITS = 12
_SECRET_BYTES = 32
_FORM = re.compile(r"sk-sluice-([0-9a-z]{4,32})-([A-Za-z0-9_-]{16,128})\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentedKey:
    """A key as a caller gave it. The text itself is not kept and not shown."""

    prefix: str
    key_hash: bytes = field(repr=False)

    def is_proven_by(self, stored_hash: bytes) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(self.key_hash, stored_hash)


def hash_api_key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def parse_api_key(text: str) -> PresentedKey | None:
    """The parts of a well-formed key, else None."""
    match = _FORM.match(text)
    return PresentedKey(prefix=match[1], key_hash=hash_api_key(text)) if match else None


def mint_api_key() -> tuple[str, PresentedKey]:
    """A new key: its text, shown once, and what is stored of it."""
    prefix = secrets.token_hex(_PREFIX_HEX_DIGITS // 2)
    text = f"{_SCHEME}{prefix}-{secrets.token_urlsafe(_SECRET_BYTES)}"
    return text, PresentedKey(prefix=prefix, key_hash=hash_api_key(text))
