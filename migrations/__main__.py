"""`python -m migrations`: brings the database at SLUICE_POSTGRES_DSN to this build's schema. Waits for the server."""

import os
from datetime import timedelta

from service_kit.environment import Environment
from service_kit.logging import configure_logging, get_logger
from state_store.postgres.migrate import upgrade, wait_for_server

STARTUP_PATIENCE = timedelta(minutes=2)


def main() -> None:
    dsn = Environment(os.environ).text("SLUICE_POSTGRES_DSN")
    configure_logging(service="migrations")
    wait_for_server(dsn, STARTUP_PATIENCE)
    upgrade(dsn)
    get_logger().info("schema_is_up_to_date")


if __name__ == "__main__":
    main()
