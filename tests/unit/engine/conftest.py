import pytest

from gpu_worker.engine import row_sampler
from tests.support.paged_attention import need_kernels


@pytest.fixture
def without_sampling_kernels(monkeypatch):
    """A sampler that finds no compiled library."""
    monkeypatch.setattr(row_sampler, "kernels_for", lambda *_: None)


@pytest.fixture(params=["kernels", "numpy"])
def each_row_sampler(request):
    """The test runs on the compiled kernels and on numpy."""
    if request.param == "numpy":
        request.getfixturevalue("without_sampling_kernels")
    else:
        need_kernels()
