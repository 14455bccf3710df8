"""Memory in large pages."""

import gc
import mmap

import torch

from gpu_worker.kernels.large_pages import PAGE_BYTES, LargePages


def test_pieces_lie_behind_each_other_and_begin_with_a_line():
    pages = LargePages()
    pieces = [pages.empty(size) for size in (1, 100, 64, 5000)]
    addresses = [piece.data_ptr() for piece in pieces]
    assert [piece.shape[0] for piece in pieces] == [1, 100, 64, 5000]
    assert addresses[0] % PAGE_BYTES == 0
    assert [address - addresses[0] for address in addresses] == [0, 64, 192, 256]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [(piece == number).all().item() for number, piece in enumerate(pieces)] == [True] * 4


def test_a_piece_larger_than_a_chunk_gets_one_of_its_own():
    pages = LargePages()
    small, large = pages.empty(8), pages.empty(9 * PAGE_BYTES + 1)
    large[-1] = 1
    assert large.data_ptr() % PAGE_BYTES == 0
    assert small.untyped_storage().data_ptr() != large.untyped_storage().data_ptr()


def test_a_chunk_goes_when_its_last_tensor_goes(monkeypatch):
    made = []

    class Watched(mmap.mmap):
        def __del__(self):
            made.append("gone")

    monkeypatch.setattr(mmap, "mmap", Watched)
    pages = LargePages()
    piece = pages.empty(8)
    pages.empty(8 * PAGE_BYTES)
    gc.collect()
    assert made == []
    assert piece.sum() == torch.tensor(0)
    del piece
    gc.collect()
    assert made == ["gone"]


def test_without_large_pages_the_memory_is_the_usual_one(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert LargePages().empty(100).sum() == torch.tensor(0)
