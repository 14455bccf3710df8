"""Services that would have an open internal port do not start."""

import os
from collections.abc import Callable
from unittest import mock

import pytest

from gateway.__main__ import main as run_gateway
from gpu_worker.__main__ import main as run_worker
from scheduler.__main__ import main as run_scheduler

VARIABLES = {
    "SLUICE_POSTGRES_DSN": "postgresql://nobody@127.0.0.1:1/none",
    "SLUICE_REDIS_URL": "redis://127.0.0.1:1/0",
    "SLUICE_SCHEDULERS": "127.0.0.1:1",
    "SLUICE_MODELS_DIR": "/nowhere",
    "SLUICE_MODEL_DIR": "/nowhere",
}


@pytest.mark.parametrize("run", [run_gateway, run_scheduler, run_worker], ids=["gateway", "scheduler", "gpu_worker"])
def test_without_token_and_certificate_a_service_says_in_one_line_what_to_set(
    run: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.dict(os.environ, VARIABLES, clear=True):
        assert run() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "SLUICE_INTERNAL_TOKEN" in said
    assert "SLUICE_INTERNAL_TLS_CERT" in said
