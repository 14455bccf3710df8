pytest_plugins = ["tests.support.servers", "tests.support.postgres", "tests.support.real_model"]
