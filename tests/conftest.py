import os
import signal
from pathlib import Path

# Before torch is loaded: threads that spin while they wait starve the servers and the other processes of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell starts its background jobs with SIGINT ignored, and the processes of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before Triton is loaded by whoever comes first: without a GPU its kernels run under its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["tests.support.servers", "tests.support.postgres", "tests.support.real_model"]
