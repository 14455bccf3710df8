import pytest

from scheduler.config import SchedulerConfig
from service_kit.environment import Environment, EnvironmentVariableError

REQUIRED = {
    "SLUICE_POSTGRES_DSN": "postgresql://db",
    "SLUICE_REDIS_URL": "redis://cache",
    "SLUICE_INTERNAL_TOKEN": "t" * 32,
}


def config(**variables):
    return SchedulerConfig.from_environment(Environment(REQUIRED | variables))


def test_tenants_share_cached_prefixes_only_where_it_is_switched_on():
    assert not config().shares_prefixes
    assert config(SLUICE_SHARE_PREFIXES_BETWEEN_TENANTS="true").shares_prefixes


def test_a_switch_that_is_neither_on_nor_off_is_refused_by_name():
    with pytest.raises(EnvironmentVariableError, match="SLUICE_SHARE_PREFIXES_BETWEEN_TENANTS"):
        config(SLUICE_SHARE_PREFIXES_BETWEEN_TENANTS="maybe")
