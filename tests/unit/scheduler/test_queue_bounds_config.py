import pytest

from scheduler.config import SchedulerConfig
from scheduler.queue.settings import QueueSettings
from service_kit.environment import Environment, EnvironmentVariableError

REQUIRED = {
    "SLUICE_POSTGRES_DSN": "postgresql://db",
    "SLUICE_REDIS_URL": "redis://cache",
    "SLUICE_INTERNAL_TOKEN": "t" * 32,
}


def config(**variables):
    return SchedulerConfig.from_environment(Environment(REQUIRED | variables))


def test_without_variables_the_queue_has_its_usual_bounds():
    assert config().queue == QueueSettings()


def test_each_bound_of_the_queue_has_its_variable():
    queue = config(
        SLUICE_QUEUE_MAX_REQUESTS="3",
        SLUICE_QUEUE_MAX_PROMPT_TOKENS="4",
        SLUICE_QUEUE_MAX_TENANT_REQUESTS="5",
        SLUICE_QUEUE_MAX_TENANT_PROMPT_TOKENS="6",
    ).queue
    assert (queue.max_requests, queue.max_prompt_tokens) == ((3, 3, 3), (4, 4, 4))
    assert (queue.max_tenant_requests, queue.max_tenant_prompt_tokens) == (5, 6)


def test_a_queue_that_holds_nothing_is_refused_by_name():
    with pytest.raises(EnvironmentVariableError, match="SLUICE_QUEUE_MAX_TENANT_REQUESTS"):
        config(SLUICE_QUEUE_MAX_TENANT_REQUESTS="0")
