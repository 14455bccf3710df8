"""What one trial does, drawn from its seed: the requests, and the fault. Pure; the same numbers draw the same trial."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.history import Wish

TEMPERATURES = (0.0, 0.8)
PROCESSES = ("gateway", "gateway-2", "scheduler", "scheduler-2", "gpu_worker", "gpu_worker-2")


class Manner(StrEnum):
    """How a client behaves."""

    STAY = "STAY"
    RETURN = "RETURN"
    """Leaves in the middle and comes back with its cursor, once or twice."""
    REPEAT = "REPEAT"
    """Several clients send the same request id at about the same time."""
    CANCEL = "CANCEL"
    CREATE = "CREATE"
    """Asks without reading, and reads later."""


class FaultKind(StrEnum):
    KILL = "KILL"
    """SIGKILL of one process."""
    KILL_ALL = "KILL_ALL"
    """SIGKILL of everything at once, both servers included."""
    PAUSE = "PAUSE"
    """SIGSTOP beyond the lease, then SIGCONT; one process, or all of one service."""
    CUT = "CUT"
    """Connections are reset."""
    BLACKHOLE = "BLACKHOLE"
    """Nothing passes for a while, then everything that was held up."""
    RESTART = "RESTART"
    """SIGTERM, then started again."""
    VALKEY_CUT = "VALKEY_CUT"
    """Valkey is killed, the last 0.1 to 2 s are cut off its append-only file, and it starts again."""
    FLUSH = "FLUSH"
    """FLUSHALL."""
    POSTGRES_KILL = "POSTGRES_KILL"
    FLUSH_AND_KILL = "FLUSH_AND_KILL"
    """FLUSHALL or a cut file, and SIGKILL of workers: the one case in which output may be lost."""
    LATE_APPEND = "LATE_APPEND"
    """A scheduler and its worker stop; when another attempt has been granted the scheduler goes on with what it had
    received of the old one."""
    DEPOSED_GRANT = "DEPOSED_GRANT"
    """A worker's connections are held up until another scheduler has taken it over, while requests keep coming: its old
    scheduler still believes that it owns it."""
    POSTGRES_STOP = "POSTGRES_STOP"
    """Postgres stands still with all its processes beyond the lease, then goes on; perhaps a worker is killed meanwhile."""
    POSTGRES_RESTART = "POSTGRES_RESTART"
    """Postgres is told to stop, and starts again; perhaps a worker is killed meanwhile."""
    VALKEY_RESTART = "VALKEY_RESTART"
    """Valkey is killed or told to stop, and starts again with all its data; perhaps a worker is killed meanwhile."""
    FLUSH_UNSEEN = "FLUSH_UNSEEN"
    """FLUSHALL while Postgres stands still: nothing can be refilled before it goes on."""
    STORES_KILL = "STORES_KILL"
    """Postgres and Valkey are killed, the end of the append-only file is cut off, and both start again."""


STORES_ONLY: tuple[FaultKind, ...] = (
    FaultKind.POSTGRES_STOP,
    FaultKind.POSTGRES_RESTART,
    FaultKind.VALKEY_RESTART,
    FaultKind.FLUSH_UNSEEN,
    FaultKind.STORES_KILL,
)
STORE_DECK: tuple[FaultKind, ...] = (
    *STORES_ONLY,
    FaultKind.POSTGRES_KILL,
    FaultKind.VALKEY_CUT,
    FaultKind.FLUSH,
    *(FaultKind.FLUSH_AND_KILL,) * 2,
)
DECK: tuple[FaultKind, ...] = (
    *(FaultKind.KILL,) * 3,
    *(FaultKind.PAUSE,) * 2,
    *(kind for kind in FaultKind if kind not in {FaultKind.KILL, FaultKind.PAUSE, *STORES_ONLY}),
)
DECKS = {"all": DECK, "stores": STORE_DECK}
"""Every run of as many trials as a deck is long has each of its faults once, in an order of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderPlan:
    """One request and its readers. Waits are seconds; `leaves_after` and `cancels_after` count tokens."""

    wish: Wish
    manner: Manner
    starts_after_s: float
    temperature: float
    seed: int | None
    priority_class: str
    num_readers: int = 1
    leaves_after: tuple[int, ...] = ()
    is_away_s: float = 0.0
    cancels_after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """`targets` are processes, `links` prefixes of link names. `is_group` stops a worker's engine with it."""

    kind: FaultKind
    at_s: float
    targets: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    lasts_s: float = 0.0
    down_s: float = 0.0
    cut_s: float = 0.0
    is_group: bool = True
    is_flush: bool = True
    """FLUSH_AND_KILL: whether the log is flushed, or cut back."""
    is_orderly: bool = False
    """VALKEY_RESTART: whether it is told to stop, or killed."""

    @property
    def can_lose_output(self) -> bool:
        return self.kind is FaultKind.FLUSH_AND_KILL


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    seed: int
    number: int
    readers: tuple[ReaderPlan, ...]
    fault: FaultPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much a trial asks for; the real engine is slower. `prompts` empty: they are made up."""

    lease_s: float
    num_readers: tuple[int, int] = (12, 20)
    num_tokens: tuple[int, int] = (6, 130)
    has_stops: bool = True
    prompts: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    """Of sampling; empty: any, or none."""


def draw_trial(seed: int, number: int, scale: Scale, deck: Sequence[FaultKind] = DECK) -> TrialPlan:
    """Trial `number` (from 1) of a run. It depends on its arguments alone, so one trial can be replayed."""
    block, place = divmod(number - 1, len(deck))
    kind = random.Random(f"deck/{seed}/{block}").sample(list(deck), len(deck))[place]
    chance = random.Random(f"trial/{seed}/{number}")
    fault = _draw_fault(chance, kind, scale)
    lasts_s = max(1.5, fault.at_s + (fault.lasts_s if kind is FaultKind.DEPOSED_GRANT else 0.5))
    count = chance.randint(*scale.num_readers)
    readers = tuple(_draw_reader(chance, f"{seed}-{number}-{place}", scale, lasts_s) for place in range(count))
    return TrialPlan(seed=seed, number=number, readers=readers, fault=fault)


def _draw_reader(chance: random.Random, name: str, scale: Scale, lasts_s: float) -> ReaderPlan:
    manner = chance.choices(list(Manner), weights=(8, 5, 3, 3, 2))[0]
    num_tokens = round(scale.num_tokens[0] * (scale.num_tokens[1] / scale.num_tokens[0]) ** chance.random() ** 0.5)
    text = chance.choice(scale.prompts or (f"chaos {name}", f"chaos {name} {'x' * 20}", f"chaos {name} {'x' * 200}"))
    wish = Wish(
        request_id=f"chaos-{name}",
        text=text,
        max_output_tokens=num_tokens,
        stop="~" if scale.has_stops and chance.random() < 0.15 else None,
        is_cancelled=manner is Manner.CANCEL,
    )
    return ReaderPlan(
        wish=wish,
        manner=manner,
        starts_after_s=0.0 if chance.random() < 0.5 else chance.uniform(0, lasts_s),
        temperature=chance.choice(TEMPERATURES),
        seed=chance.choice(scale.seeds or (7, chance.getrandbits(62), None)),
        priority_class=chance.choice(("interactive", "standard", "standard", "batch")),
        num_readers=chance.choice((2, 3)) if manner is Manner.REPEAT else 1,
        leaves_after=tuple(sorted(chance.sample(range(1, max(4, num_tokens)), chance.choice((1, 2))))),
        is_away_s=chance.uniform(0.05, 1.5),
        cancels_after=chance.choice((0, 0, chance.randint(1, num_tokens))),
    )


def _draw_fault(chance: random.Random, kind: FaultKind, scale: Scale) -> FaultPlan:
    draw = _Draw(chance, scale)
    plans: dict[FaultKind, Callable[[], FaultPlan]] = {
        FaultKind.KILL: lambda: FaultPlan(kind=kind, at_s=draw.at_s, targets=(draw.process,), down_s=draw.down_s),
        FaultKind.KILL_ALL: lambda: FaultPlan(kind=kind, at_s=draw.at_s, down_s=draw.down_s),
        FaultKind.PAUSE: draw.pause,
        FaultKind.CUT: lambda: FaultPlan(kind=kind, at_s=draw.at_s, links=(draw.link(),)),
        FaultKind.BLACKHOLE: lambda: FaultPlan(
            kind=kind, at_s=draw.at_s, links=(draw.link(),), lasts_s=chance.choice((0.4, 1.5, 3.0))
        ),
        FaultKind.RESTART: lambda: FaultPlan(kind=kind, at_s=draw.at_s, targets=(draw.process,)),
        FaultKind.VALKEY_CUT: lambda: FaultPlan(
            kind=kind, at_s=draw.at_s, down_s=draw.down_s / 2, cut_s=chance.uniform(0.1, 2.0)
        ),
        FaultKind.FLUSH: lambda: FaultPlan(kind=kind, at_s=draw.at_s),
        FaultKind.POSTGRES_KILL: lambda: FaultPlan(kind=kind, at_s=draw.at_s, down_s=draw.down_s),
        FaultKind.FLUSH_AND_KILL: draw.flush_and_kill,
        FaultKind.LATE_APPEND: lambda: FaultPlan(
            kind=kind, at_s=draw.at_s, lasts_s=3 * scale.lease_s, down_s=chance.uniform(0.2, 0.6)
        ),
        FaultKind.DEPOSED_GRANT: lambda: FaultPlan(
            kind=kind, at_s=draw.at_s / 2, targets=(draw.worker,), lasts_s=chance.uniform(3.0, 4.5)
        ),
        FaultKind.POSTGRES_STOP: lambda: draw.outage(kind, lasts_s=scale.lease_s + chance.uniform(0.3, 3.0)),
        FaultKind.POSTGRES_RESTART: lambda: draw.outage(kind, lasts_s=chance.choice((0.0, 1.0, scale.lease_s + 1.0))),
        FaultKind.VALKEY_RESTART: lambda: draw.outage(kind, lasts_s=chance.choice((0.0, 1.0, 2.5))),
        FaultKind.FLUSH_UNSEEN: lambda: FaultPlan(kind=kind, at_s=draw.at_s, lasts_s=chance.uniform(0.5, 4.0)),
        FaultKind.STORES_KILL: lambda: FaultPlan(
            kind=kind, at_s=draw.at_s, down_s=draw.down_s, cut_s=chance.uniform(0.1, 2.0)
        ),
    }
    return plans[kind]()


class _Draw:
    """What faults have in common."""

    def __init__(self, chance: random.Random, scale: Scale) -> None:
        self._chance = chance
        self._lease_s = scale.lease_s
        self.at_s = chance.uniform(0.2, 1.8)
        self.down_s = chance.choice((0.0, 0.3, 1.2))
        self.process = chance.choice(PROCESSES)
        self.worker = chance.choice(("gpu_worker", "gpu_worker-2"))

    def link(self) -> str:
        """One link, all of one kind, or all there are."""
        kinds = ("client->", "gateways->", "schedulers->", "workers->", "valkey<-", "")
        single = (
            f"schedulers->{self.worker}",
            f"valkey<-{self._chance.choice(PROCESSES[:4])}",
            f"postgres<-{self._chance.choice(PROCESSES[:4])}",
        )
        return self._chance.choice((*kinds, *single))

    def pause(self) -> FaultPlan:
        service = self.process.removesuffix("-2")
        return FaultPlan(
            kind=FaultKind.PAUSE,
            at_s=self.at_s,
            targets=(service, f"{service}-2") if self._chance.random() < 0.2 else (self.process,),
            lasts_s=self._lease_s + self._chance.uniform(0.3, 1.2),
            is_group=self._chance.random() < 0.7,
        )

    def outage(self, kind: FaultKind, *, lasts_s: float) -> FaultPlan:
        """Of one store; in two of five a worker is killed in the middle of it."""
        return FaultPlan(
            kind=kind,
            at_s=self.at_s,
            lasts_s=lasts_s,
            targets=(self.worker,) if self._chance.random() < 0.4 else (),
            is_orderly=self._chance.random() < 0.5,
        )

    def flush_and_kill(self) -> FaultPlan:
        return FaultPlan(
            kind=FaultKind.FLUSH_AND_KILL,
            at_s=self.at_s,
            targets=("gpu_worker", "gpu_worker-2") if self._chance.random() < 0.5 else (self.worker,),
            cut_s=self._chance.uniform(0.1, 2.0),
            is_flush=self._chance.random() < 0.5,
        )
