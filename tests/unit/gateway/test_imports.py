import subprocess
import sys


def test_the_gateway_starts_without_torch_and_transformers() -> None:
    """Loading either costs seconds and hundreds of megabytes, and the gateway is installed without them."""
    program = "import gateway.__main__, sys; assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_missing_variable_is_named_and_ends_the_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway"], capture_output=True, text=True, check=False, timeout=60, env={}
    )
    assert done.returncode == 2
    assert "SLUICE_POSTGRES_DSN" in done.stderr
