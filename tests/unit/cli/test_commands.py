import io
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from service_kit.sampling import FinishReason
from sluice.__main__ import build_app
from sluice.answer import Answer
from sluice.client_events import Finished, Sampling
from sluice.commands.demo import Outcome, find_problems
from sluice.commands.models import require_model
from sluice.commands.sampling_options import with_sampling_options
from sluice.commands.status import StoreStatus, render_status
from sluice.console import PrefixedLog
from sluice.errors import UserError
from sluice.home import find_home
from sluice.keys import parse_tenant
from sluice.local.health import Health
from sluice.run_file import read_run_file
from sluice.timeline import Span

SERVICES = {
    "scheduler": {"address": "127.0.0.1:1", "pid": 11},
    "gateway": {"address": "127.0.0.1:2", "pid": 12},
}


def test_status_names_what_is_away_and_says_when_there_is_no_worker() -> None:
    health = {"scheduler": Health.SERVING, "gateway": Health.UNREACHABLE}
    lines = render_status(SERVICES, health, StoreStatus(queued=3, running=0, sessions=()))
    assert [line.split() for line in lines[:3]] == [
        ["scheduler", "SERVING", "127.0.0.1:1", "pid", "11"],
        ["gateway", "UNREACHABLE", "127.0.0.1:2", "pid", "12"],
        ["postgres", "SERVING", "3", "queued,", "0", "running"],
    ]
    assert "requests wait in the queue" in lines[3]
    assert render_status(SERVICES, health, None)[-1].split() == ["postgres", "UNREACHABLE"]


def _outcome(text: str, spans: list[Span], output_tokens: int = 3) -> Outcome:
    finished = Finished(
        finish_reason=FinishReason.STOP,
        prompt_tokens=1,
        cached_prompt_tokens=0,
        output_tokens=output_tokens,
        matched_stop=None,
    )
    answer = Answer(
        generation_id="g",
        request_id="r",
        text=text,
        finished=finished,
        first_token_s=0.1,
        tokens_per_s=9.0,
        num_reconnects=0,
    )
    return Outcome(answer=answer, spans=spans)


def _span(service: str, parent_id: str | None) -> Span:
    return Span(trace_id="t", span_id=service, parent_id=parent_id, service=service, name="n", start_ns=0, end_ns=1)


WHOLE = [
    _span("client", None),
    _span("gateway", "client"),
    _span("scheduler", "gateway"),
    _span("gpu_worker", "scheduler"),
]


def test_the_demo_holds_only_with_paris_a_whole_trace_and_nothing_left_running() -> None:
    assert find_problems(_outcome("It is Paris.", WHOLE), is_real=True, running=[]) == []
    assert find_problems(_outcome("xyz", WHOLE), is_real=False, running=[]) == []
    assert find_problems(_outcome("London", WHOLE), is_real=True, running=[]) == ["the answer does not name Paris"]
    assert find_problems(_outcome("Paris", WHOLE[:3]), is_real=True, running=[]) == [
        "the trace has no span of gpu_worker"
    ]
    torn = [*WHOLE[:3], _span("gpu_worker", "elsewhere")]
    assert find_problems(_outcome("Paris", torn), is_real=True, running=[]) == ["the spans do not form one tree"]
    assert find_problems(_outcome("Paris", WHOLE, 0), is_real=True, running=["gateway"]) == [
        "there is no output",
        "gateway still runs",
    ]


def test_lines_of_several_processes_stand_behind_their_names_without_colour_outside_a_terminal() -> None:
    stream = io.StringIO()
    log = PrefixedLog(stream)
    log("gateway", "one")
    log("scheduler", "two")
    assert stream.getvalue() == "gateway     | one\nscheduler   | two\n"


def test_every_command_is_shown_by_help_and_one_is_loaded_when_it_is_named() -> None:
    everything = CliRunner().invoke(build_app([]), ["--help"])
    commands = ("up", "demo", "generate", "chat", "status", "migrate", "usage", "audit")
    for name in (*commands, "models", "tenants", "keys", "quotas", "dead-letters"):
        assert f" {name} " in everything.output
    only = CliRunner().invoke(build_app(["models", "list"]), ["--help"])
    assert " models " in only.output
    assert " generate " not in only.output


def _wishes_of(*options: str) -> Sampling:
    """What a command gets from its command line."""
    wishes: list[Sampling] = []

    @with_sampling_options
    def command(name: str, *, is_loud: bool = False, sampling: Sampling) -> None:
        assert (name, is_loud) == ("you", True)
        wishes.append(sampling)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["you", "--is-loud", *options])
    if result.exception is not None:
        raise result.exception
    return wishes[0]


def test_every_sampling_parameter_is_an_option_and_the_rest_is_left_to_the_server() -> None:
    assert _wishes_of() == Sampling()
    options = (
        "--max-tokens 9 --min-output-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --repetition-penalty 1.1"
        " --presence-penalty -0.5 --frequency-penalty 0.25 --logit-bias 42=-100 --logit-bias 7=1.5 --seed 5 --stop a"
        " --stop b --include-stop --logprobs 0"
    )
    assert _wishes_of(*options.split()) == Sampling(
        max_output_tokens=9,
        min_output_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={42: -100.0, 7: 1.5},
        seed=5,
        stop=("a", "b"),
        include_stop=True,
        logprobs=0,
    )


@pytest.mark.parametrize("bias", ["42", "42=", "=1", "a=1", "-1=1", "4294967296=1"])
def test_a_bias_that_is_none_is_refused_as_it_was_written(bias: str) -> None:
    with pytest.raises(UserError, match=f"--logit-bias {bias}"):
        _wishes_of(f"--logit-bias={bias}")


def test_two_biases_of_one_token_are_refused() -> None:
    with pytest.raises(UserError, match="token 7 has a bias already"):
        _wishes_of("--logit-bias", "7=1", "--logit-bias", "7=2")


def test_a_model_is_refused_when_it_is_absent_or_for_the_other_engine(tmp_path: Path) -> None:
    home = find_home(tmp_path)
    with pytest.raises(UserError, match="sluice models pull absent"):
        require_model(home, "absent", engine="native")
    assert require_model(home, "toy", engine="simulated").precision == "sim"
    with pytest.raises(UserError, match="--engine simulated"):
        require_model(home, "toy", engine="native")


def test_models_list_shows_what_is_here_and_what_can_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    runner = CliRunner()
    assert runner.invoke(build_app(["models"]), ["models", "make-simulated", "toy"]).exit_code == 0
    listing = runner.invoke(build_app(["models"]), ["models", "list"]).output.splitlines()
    assert listing[0].startswith("toy ")
    assert "sim, context 8192, revision " in listing[0]
    assert "sluice models pull smollm2-135m-instruct" in listing[1]
    again = runner.invoke(build_app(["models"]), ["models", "make-simulated", "toy"])
    assert isinstance(again.exception, UserError)


@pytest.mark.parametrize("text", ["", "Upper", "-dash", "a b", "a" * 64, "new\nline"])
def test_a_tenant_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a tenant"):
        parse_tenant(text)
    assert parse_tenant("team-1.b") == "team-1.b"


def test_a_missing_run_file_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sluice up"):
        read_run_file(tmp_path / "run.json")


def test_the_home_is_option_then_environment_then_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICE_HOME", raising=False)
    assert find_home().root == tmp_path / ".sluice"
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "b"))
    assert find_home().root == tmp_path / "b"
    assert find_home(tmp_path / "c").models == tmp_path / "c" / "models"
