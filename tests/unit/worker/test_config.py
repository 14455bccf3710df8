import subprocess
import sys

import pytest

from gpu_worker.config import WorkerConfig
from service_kit.environment import Environment, EnvironmentVariableError

MINIMAL = {"SLUICE_SCHEDULERS": "a:1,b:2", "SLUICE_MODEL_DIR": "/models/m", "SLUICE_INTERNAL_TOKEN": "t"}


def read(**changes):
    return WorkerConfig.from_environment(Environment({**MINIMAL, **changes}))


def test_defaults_need_only_the_schedulers_and_the_model():
    config = read()
    assert config.schedulers == ("a:1", "b:2")
    assert config.advertise == config.worker_id == config.listen


def test_engine_settings_are_a_json_object():
    assert read(SLUICE_ENGINE_SETTINGS='{"num_blocks": 3}').engine_settings == {"num_blocks": 3}
    for wrong in ("{", "[]"):
        with pytest.raises(EnvironmentVariableError, match="SLUICE_ENGINE_SETTINGS"):
            read(SLUICE_ENGINE_SETTINGS=wrong)


@pytest.mark.parametrize(("engine", "precision"), [("simulated", "fp32"), ("native", "sim")])
def test_an_engine_that_does_not_fit_the_model_is_refused(engine, precision):
    with pytest.raises(EnvironmentVariableError, match="SLUICE_ENGINE"):
        read(SLUICE_ENGINE=engine).check_engine(precision)
    read(SLUICE_ENGINE="auto").check_engine(precision)


def test_the_service_process_loads_no_torch():
    code = "import gpu_worker.__main__, gpu_worker.engine.__main__, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
