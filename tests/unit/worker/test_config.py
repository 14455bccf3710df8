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


def test_speculation_has_variables_of_its_own_that_outrank_the_engine_settings():
    config = read(
        SLUICE_ENGINE_SETTINGS='{"speculation": "off", "num_blocks": 3}',
        SLUICE_SPECULATION="draft",
        SLUICE_DRAFT_MODEL_DIR="/models/small",
        SLUICE_MAX_DRAFT_TOKENS="4",
    )
    assert config.settings_for("fp32") == {
        "speculation": "draft",
        "draft_model": "/models/small",
        "max_draft_tokens": 4,
        "num_blocks": 3,
    }
    assert read(SLUICE_ENGINE_SETTINGS='{"speculation": "off"}').settings_for("fp32") == {"speculation": "off"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLUICE_SPECULATION", "sometimes"), ("SLUICE_MAX_DRAFT_TOKENS", "0"), ("SLUICE_MAX_DRAFT_TOKENS", "x")],
)
def test_a_bad_setting_of_speculation_is_refused_by_name(name, value):
    with pytest.raises(EnvironmentVariableError, match=name):
        read(**{name: value})


def test_a_simulated_engine_takes_no_speculation():
    assert read(SLUICE_SPECULATION="off").settings_for("sim") == {}
    with pytest.raises(EnvironmentVariableError, match="SLUICE_SPECULATION"):
        read(SLUICE_SPECULATION="ngram").settings_for("sim")
