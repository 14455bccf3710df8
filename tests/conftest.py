pytest_plugins = ["tests.support.servers", "tests.support.postgres"]
