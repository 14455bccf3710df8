import os

# Before torch is loaded: threads that spin while they wait starve the servers and the other processes of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

pytest_plugins = ["tests.support.servers", "tests.support.postgres", "tests.support.real_model"]
