"""What the worker sessions of one scheduler share."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.assignments import Assignments
from scheduler.coordinator import Coordinator
from scheduler.output_charges import OutputCharges
from service_kit.internal_access import InternalAccess
from state_store.ports import GenerationStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """`clock` is monotonic seconds."""

    store: GenerationStore
    coordinator: Coordinator
    charges: OutputCharges
    assignments: Assignments
    clock: Callable[[], float]
    access: InternalAccess
    on_room: Callable[[], None]
    """Called when a session may have room again."""
    shares_prefixes: bool = False
    """Whether tenants share cached prefixes."""
