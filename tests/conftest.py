import os
import signal

# Before torch is loaded: threads that spin while they wait starve the servers and the other processes of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell starts its background jobs with SIGINT ignored, and the processes of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.support.servers", "tests.support.postgres", "tests.support.real_model"]
