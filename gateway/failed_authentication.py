"""How often a peer may present keys that prove nothing. Pure: time is given.

A peer is an address without its port; IPv6 ones count by their /64, which one subscriber has whole. All unix sockets are one.
"""

import re
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import IPv6Network, ip_address
from urllib.parse import unquote

_PEER = re.compile(r"ipv[46]:\[?(?P<host>[^\[\]]+?)\]?:\d+\Z")
_IPV6_PREFIX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLimits:
    """After `max_failures` within `window` a peer is limited to one look-up per `lookup_interval`, until fewer lie within
    the window. `max_peers` are remembered; the one that failed longest ago is forgotten for a new one."""

    max_failures: int = 10
    window: timedelta = timedelta(seconds=60)
    lookup_interval: timedelta = timedelta(seconds=1)
    max_peers: int = 10_000


@dataclass(slots=True, kw_only=True)
class _Peer:
    failures_s: deque[float]
    next_lookup_s: float = 0.0
    reported_s: float | None = None


@dataclass(slots=True, kw_only=True)
class FailureCounts:
    """Since the start: calls whose key proved nothing, and calls refused without a look at the store."""

    failed: int = 0
    refused: int = 0


@dataclass(slots=True)
class FailedAuthentication:
    """Owner of the failures of every peer. Times are seconds of a monotonic clock."""

    limits: FailureLimits = field(default_factory=FailureLimits)
    counts: FailureCounts = field(default_factory=FailureCounts)
    _peers: "OrderedDict[str, _Peer]" = field(default_factory=OrderedDict)

    def is_limited(self, peer: str, now_s: float) -> bool:
        """Whether it has used up its failures. Changes nothing."""
        known = self._peers.get(peer)
        if known is None or len(known.failures_s) < self.limits.max_failures:
            return False
        return now_s - known.failures_s[0] < self.limits.window.total_seconds()

    def take_lookup(self, peer: str, now_s: float) -> timedelta | None:
        """None: a limited peer may look one key up now, and none for an interval. Else how long until the next one."""
        known = self._peers[peer]
        if now_s < known.next_lookup_s:
            return timedelta(seconds=known.next_lookup_s - now_s)
        known.next_lookup_s = now_s + self.limits.lookup_interval.total_seconds()
        return None

    def note_failure(self, peer: str, now_s: float) -> bool:
        """Counts a key that proved nothing. True for what is worth a line in the log: at most one per peer and window."""
        self.counts.failed += 1
        known = self._peers.get(peer)
        if known is None:
            known = _Peer(failures_s=deque(maxlen=self.limits.max_failures))
            self._peers[peer] = known
            while len(self._peers) > self.limits.max_peers:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        known.failures_s.append(now_s)
        is_due = known.reported_s is None or now_s - known.reported_s >= self.limits.window.total_seconds()
        if is_due:
            known.reported_s = now_s
        return is_due

    def note_refusal(self) -> None:
        self.counts.refused += 1


def peer_of(text: str) -> str:
    """The peer behind gRPC's "ipv4:1.2.3.4:567", "ipv6:[::1]:567" (perhaps percent-encoded) or "unix:…"."""
    found = _PEER.match(unquote(text))
    if found is None:
        return text.partition(":")[0]
    try:
        address = ip_address(found["host"].partition("%")[0])
    except ValueError:
        return found["host"]
    if address.version == 4:  # noqa: PLR2004 - IPv4
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((address, _IPV6_PREFIX), strict=False))
