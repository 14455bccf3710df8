"""Copies between host and device that wait for nothing: one page in and one out for each step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.attention.triton_step import Integers, page_slices, write_page

_NUM_PAGES = 2
"""The host writes one while the other may still be read: the step before it has been waited for then."""


class StepPages:
    """Integers on their way to the device. The device has one page, written in the order of its stream."""

    def __init__(self, *, num_integers: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self._hosts = [torch.zeros(num_integers, dtype=torch.int32, pin_memory=is_pinned) for _ in range(_NUM_PAGES)]
        self._device_page = torch.zeros(num_integers, dtype=torch.int32, device=device)
        self._turn = 0

    def send(self, sections: Sequence[Integers]) -> list[torch.Tensor]:
        """The sections on the device; valid until the next but one call, and then overwritten. One copy."""
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % _NUM_PAGES
        slices = write_page(sections, host.numpy())
        end = slices[-1].stop
        self._device_page[:end].copy_(host[:end], non_blocking=True)
        return [self._device_page[place] for place in slices]

    def places(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Where sections of these sizes will stand, the last one up to the end of the page."""
        slices = page_slices(sizes)
        slices[-1] = slice(slices[-1].start, None)
        return [self._device_page[place] for place in slices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """Token ids that are on their way to the host."""

    host: torch.Tensor
    arrival: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """Raises what the device reports of the step."""
        if self.arrival is not None:
            self.arrival.synchronize()
        ids: list[int] = self.host.tolist()
        return ids


class DrawnIds:
    """The ids that the last step drew, on the device, for the step after it and for the host."""

    def __init__(self, *, num_rows: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self.on_device = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(num_rows, dtype=torch.int32, pin_memory=is_pinned) for _ in range(_NUM_PAGES)]
        self._turn = 0

    def fetch(self, num_rows: int) -> Arriving:
        """Starts the copy of the first rows; to be waited for before the next but one call."""
        host = self._hosts[self._turn][:num_rows]
        self._turn = (self._turn + 1) % _NUM_PAGES
        host.copy_(self.on_device[:num_rows], non_blocking=True)
        arrival = None
        if self.on_device.is_cuda:
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
        return Arriving(host=host, arrival=arrival)
