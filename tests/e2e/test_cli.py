"""The commands as a person runs them."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def home() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="sluice-cli-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "SLUICE_HOME": str(home), "NO_COLOR": "1"}


def _run(home: Path, *arguments: str, timeout_s: float = 60.0, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice", *arguments],
        env=_environment(home),
        input=typed,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _processes_of(home: Path) -> list[str]:
    """Command lines that name the home, or that inherited it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(home).encode() in text and process.name != str(os.getpid()):
            found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


REPLICAS = ("--gateways", "2", "--schedulers", "2", "--workers", "2")


@pytest.mark.parametrize(("number", "replicas"), [(signal.SIGINT, ()), (signal.SIGTERM, REPLICAS)])
def test_up_serves_generate_and_status_and_leaves_nothing_behind(
    home: Path, number: signal.Signals, replicas: tuple[str, ...]
) -> None:
    log = home / "up.log"
    suffixes = ("", "-2") if replicas else ("",)
    names = {f"{service}{suffix}" for service in ("gateway", "scheduler", "gpu_worker") for suffix in suffixes}
    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, "-m", "sluice", "up", "--engine", "simulated", "--port", "0", *replicas],
            env=_environment(home),
            stdout=output,
            stderr=output,
        ) as up,
    ):
        try:
            _wait_for_line(log, "ready: gateway", up)
            addresses = {
                name: entry["address"]
                for name, entry in json.loads((home / "run.json").read_text())["services"].items()
            }
            assert set(addresses) == names
            assert all(f"{name} at {address}" in log.read_text() for name, address in addresses.items())
            answer = _run(home, "generate", "hello", "--max-tokens", "12", "--seed", "4")
            assert answer.returncode == 0, answer.stderr
            assert len(answer.stdout.rstrip("\n")) == 12
            assert "12 output tokens, ended by LENGTH" in answer.stderr
            assert "generation " in answer.stderr
            elsewhere = () if not replicas else ("--target", f"127.0.0.1:1,{addresses['gateway-2']}")
            again = _run(home, "generate", "hello", "--max-tokens", "12", "--seed", "4", "--logprobs", "1", *elsewhere)
            assert again.stdout == answer.stdout
            first = f'"{answer.stdout[0]}"'
            assert f"    1  {first}" in again.stderr
            shown = [line for line in again.stderr.splitlines() if not line.startswith("[")]
            assert shown[0].endswith(f"  {first} 0.0000")
            status = _run(home, "status")
            assert status.returncode == 0, status.stdout + status.stderr
            assert status.stdout.count("SERVING") == len(names) + 1
            assert "session        worker" in status.stdout
            assert {stat.S_IMODE((home / name).stat().st_mode) for name in ("api-key", "admin-key")} == {0o600}
            second = _run(home, "up", "--engine", "simulated", "--port", "0")
            assert second.returncode == 1
            assert "runs already" in second.stderr
            run = json.loads((home / "run.json").read_text())
            os.kill(run["services"]["gpu_worker"]["pid"], signal.SIGKILL)
            _wait_for_line(log, "gpu_worker was ended by signal 9; starting it again", up)
            after = _run(home, "generate", "hello", "--max-tokens", "12", "--seed", "4")
            assert after.stdout == answer.stdout
        finally:
            up.send_signal(number)
            up.wait(40)
    assert up.returncode == 0, log.read_text()
    assert _processes_of(home) == []
    assert not (home / "run.json").exists()


def test_a_killed_up_takes_everything_with_it_and_the_next_one_starts(home: Path) -> None:
    command = [sys.executable, "-m", "sluice", "up", "--engine", "simulated", "--port", "0"]
    for is_first in (True, False):
        log = home / f"up-{is_first}.log"
        with (
            log.open("w") as output,
            subprocess.Popen(command, env=_environment(home), stdout=output, stderr=output) as up,
        ):
            try:
                _wait_for_line(log, "ready: gateway", up)
            finally:
                up.kill() if is_first else up.terminate()
        deadline = time.monotonic() + 30
        while _processes_of(home):
            assert time.monotonic() < deadline, _processes_of(home)
            time.sleep(0.1)


def test_a_person_chats_makes_keys_and_interrupts_an_answer(home: Path) -> None:
    log = home / "up.log"
    environment = {**_environment(home), "SLUICE_ENGINE_SETTINGS": '{"tokens_per_s": 100}'}
    command = [sys.executable, "-m", "sluice"]
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*command, "up", "--engine", "simulated", "--port", "0"], env=environment, stdout=output, stderr=output
        ) as up,
    ):
        try:
            _wait_for_line(log, "ready: gateway", up)
            chat = _run(home, "chat", "--max-tokens", "5", typed="hello\nand then\n\n")
            assert chat.returncode == 0, chat.stderr
            assert chat.stderr.count("5 output tokens") == 2
            key = _run(home, "keys", "create", "--tenant", "team-a")
            assert key.returncode == 0, key.stderr
            as_team = _run(home, "generate", "hi", "--max-tokens", "3", "--api-key", key.stdout.strip())
            assert as_team.returncode == 0, as_team.stderr
            refused = _run(home, "generate", "hi", "--api-key", "wrong")
            assert refused.returncode == 1
            assert "API key" in refused.stderr
            by_tenant = ("usage", "--group-by", "tenant,state", "--format", "csv")
            asked = _run(home, *by_tenant, "--api-key", (home / "admin-key").read_text().strip())
            assert asked.stdout == _run(home, *by_tenant).stdout, asked.stderr
            assert [line.split(",")[:3] for line in asked.stdout.splitlines()[1:]] == [
                ["local", "SUCCEEDED", "2"],
                ["team-a", "SUCCEEDED", "1"],
            ]
            denied = _run(home, *by_tenant, "--api-key", key.stdout.strip())
            assert (denied.returncode, denied.stdout) == (1, "")
            assert denied.stderr == "error: ADMIN_KEY_REQUIRED: this call needs an admin key\n"
            with subprocess.Popen(
                [*command, "generate", "long", "--max-tokens", "7000"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ) as asking:
                assert asking.stdout is not None
                assert asking.stdout.read(1)
                asking.send_signal(signal.SIGINT)
                asking.stdout.read()
            assert asking.returncode != 0
            deadline = time.monotonic() + 5
            while "0 queued, 0 running" not in _run(home, "status").stdout:
                assert time.monotonic() < deadline, "the interrupted generation still runs"
        finally:
            up.terminate()
            up.wait(40)


def test_errors_are_one_line_that_says_what_to_do(home: Path) -> None:
    for arguments, expected in (
        (("generate", "hi"), "start one with: sluice up"),
        (("status",), "start one with: sluice up"),
        (("up",), "sluice models pull smollm2-135m-instruct"),
        (("models", "pull", "unknown"), "known models: smollm2-135m-instruct"),
        (("keys", "create", "--tenant", "No Good"), "is not a tenant"),
        (("generate", "hi", "--target", "127.0.0.1:1"), "no API key"),
    ):
        result = _run(home, *arguments)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1, result.stderr
        assert result.stderr.startswith("error: ")
        assert expected in result.stderr


def test_the_demo_with_the_simulated_engine_holds(home: Path) -> None:
    result = _run(home, "demo", "--engine", "simulated", timeout_s=90)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    for expected in ("generation ", "prompt tokens", "first token after", "tokens/s", "trace ", "all held"):
        assert expected in result.stderr
    for service in ("client: ask", "gateway: ", "scheduler: ", "gpu_worker: "):
        assert service in result.stderr
    assert _processes_of(home) == []


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_demo_with_the_real_model_names_paris(home: Path) -> None:
    shared = Path(".sluice").absolute()
    shared.mkdir(exist_ok=True)
    assert _run(shared, "models", "pull", timeout_s=180).returncode == 0
    (home / "models").symlink_to(shared / "models")
    result = _run(home, "demo", timeout_s=120)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert _processes_of(home) == []


def _wait_for_line(log: Path, text: str, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
