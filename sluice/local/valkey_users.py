"""Who may do what in Redis or Valkey. Pure. The local stack writes it down as an ACL file; docker-compose.yml says the same.

Names: `log:…` is the delta log, `{quota:…}` the quotas, `queue:…` and `{q:…}` the admission queue; `log:gw:<gateway>`,
`scheduler:cancelled` and `queue:news` are channels. A script names its keys under (+eval +evalsha ~…), and what it runs is
checked one by one.
"""

import hashlib
import hmac
from collections.abc import Mapping

ADMIN = "admin"
"""The stack's own: backups, repairs, tests. No service has it."""

_CONNECT = "+ping +info +select +client|setinfo +subscribe +unsubscribe +time"
_STRUCTURES = "+@hash +@set +@sortedset +@string +del +exists +pexpire +pttl"
_COUNT = f"+eval +evalsha {_STRUCTURES} -@dangerous ~{{quota:*"

RULES: Mapping[str, str] = {
    "default": "off",
    ADMIN: "on ~* &* +@all",
    # Reads logs, watches them, counts quotas. Knows nothing of the queue, and cannot write into a log.
    "gateway": (
        f"on &log:gw:* -@all {_CONNECT} (+eval +evalsha ~log:*) (+hmget +xrange +pttl %R~log:*)"
        f" (+zadd +zscore +zremrangebyscore +pexpire ~log:*:watchers) ({_COUNT})"
    ),
    # Scans for logs that nobody closed.
    "scheduler": (
        f"on &log:gw:* &scheduler:cancelled &queue:news -@all {_CONNECT} +publish +scan"
        f" (+eval +evalsha {_STRUCTURES} +@stream -@dangerous ~log:* ~queue:* ~{{q:*) ({_COUNT})"
    ),
}
"""Rules without passwords, by user."""

PASSWORDLESS = frozenset({"default"})


def derive_password(secret: str, user: str) -> str:
    """A user's own password from the stack's drawn secret; tells nothing of the others."""
    return hmac.new(secret.encode(), f"valkey-user:{user}".encode(), hashlib.sha256).hexdigest()


def render_acl_file(passwords: Mapping[str, str]) -> str:
    """The users with the hashes of their passwords. Raises KeyError for a user without one."""
    lines = []
    for user, rules in RULES.items():
        secret = "" if user in PASSWORDLESS else f" #{hashlib.sha256(passwords[user].encode()).hexdigest()}"
        lines.append(f"user {user} reset {rules}{secret}\n")
    return "".join(lines)
