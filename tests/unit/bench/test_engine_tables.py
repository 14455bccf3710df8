import sys
from dataclasses import replace

import pytest

from bench.engine.contestants import Contestant, Peers
from bench.engine.limits import figures
from bench.engine.rounds import best_of, describe, measure
from bench.engine.tables import END, START, bound_table, figure_table, replace_between, speed_table
from bench.engine.workload import WORKLOADS
from bench.figures import Figure

ECHO = """
import json, sys
print("noise")
print(json.dumps({"is_ready": True}), flush=True)
for number, _ in enumerate(sys.stdin):
    requests = int(sys.argv[sys.argv.index("--requests") + 1])
    print(json.dumps({"wall_s": 1.0, "output_tokens_per_s": float(requests + number)}), flush=True)
"""


def rates(*values):
    return [{"wall_s": 1 / value, "output_tokens_per_s": value} for value in values]


def figure_values(samples):
    return {figure.name: figure.value for figure in figures(samples)}


def test_a_figure_is_the_median_of_the_ratios_of_each_round():
    samples = {("alone int8", "32"): rates(20, 30, 90), ("vLLM", "32"): rates(10, 10, 10)}
    (figure,) = figures(samples)
    assert (figure.value, figure.at_least, figure.note) == (3, 2.0, "2.00 to 9.00")
    assert describe([3, 2, 9]) == "3.00 (2.00 to 9.00)"


def test_the_peer_with_several_types_counts_with_the_best_of_each_round():
    samples = {
        ("alone int8", "64"): rates(30, 30),
        ("llama.cpp Q4_0", "64"): rates(10, 20),
        ("llama.cpp Q8_0", "64"): rates(15, 12),
    }
    assert figure_values(samples) == {"int8, 64 / llama.cpp's best type": 1.75}
    assert best_of([[1.0], [], [3.0]]) == [3.0]


def test_the_time_to_the_first_token_is_a_ratio_of_times():
    samples = {("alone int8", "prompt"): rates(2), ("llama.cpp F16", "prompt"): rates(1)}
    assert figure_values(samples) == {"int8, time to first token of 1,024 / llama.cpp's best": 0.5}


def test_a_figure_that_misses_its_limit_is_not_kept():
    samples = {("alone fp32", "64"): rates(10), ("transformers", "naive"): rates(2)}
    (figure,) = figures(samples)
    assert (figure.value, figure.is_kept) == (5, False)
    samples["alone fp32", "64"] = rates(16)
    (figure,) = figures(samples)
    assert figure.is_kept


def test_tables_have_a_row_for_each_contestant_and_dashes_for_what_is_missing():
    samples = {("a", "32"): rates(20, 30, 90), ("a", "prompt"): rates(2), ("b", "32"): rates(10)}
    assert speed_table(samples, ["32", "prompt"])[2:] == ["| a | 30 | 0.50 s |", "| b | 10 | – |"]


def test_steps_stand_beside_their_bound():
    samples = {
        ("alone fp32", "32"): [{"step_ms": 130.0}],
        ("bound fp32", "32"): [{"bound_ms": 100.0, "kv_ms": 10.0}],
    }
    assert bound_table(samples, ["fp32", "int8"])[2:] == [
        "| fp32, 32 | 1.30 (1.30 to 1.30) | 130.0 | 100.0 | 90.0 | 10.0 |"
    ]
    assert bound_table({}, ["fp32"]) == []


def test_a_figure_is_shown_with_its_limit():
    figure = Figure(name="it", value=2.0, at_least=3.0, note="1 to 4")
    assert figure_table([figure])[2:] == ["| it | 2 | ≥ 3 | no | 1 to 4 |"]


def test_only_what_stands_between_the_marks_is_replaced():
    page = f"before\n{START}\nold\n{END}\nafter\n"
    assert replace_between(page, ["new"]) == f"before\n{START}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="missing"):
        replace_between("no marks", ["new"])


def test_prompts_are_the_same_each_time_and_of_the_wanted_size():
    workload = WORKLOADS["32"]
    assert workload.prompts() == workload.prompts() != workload.prompts(1)
    assert [len(prompt) for prompt in workload.prompts()] == [128] * 32


def test_a_contestant_runs_its_workload_in_each_round_of_one_process():
    echo = Contestant(name="echo", command=(sys.executable, "-c", ECHO))
    samples, broken = measure([(echo, "32"), (replace(echo, name="other"), "64")], WORKLOADS, 2)
    assert {key: [each["output_tokens_per_s"] for each in found] for key, found in samples.items()} == {
        ("echo", "32"): [32, 33],
        ("other", "64"): [64, 65],
    }
    assert broken == {}


def test_a_contestant_that_fails_is_told_and_left_out():
    bad = Contestant(name="bad", command=(sys.executable, "-c", "raise SystemExit('no model')"))
    samples, broken = measure([(bad, "32")], WORKLOADS, 1)
    assert samples == {}
    assert broken == {"bad, 32": "bad: exit status 1: no model"}


def test_peers_that_are_missing_do_not_take_part(tmp_path):
    assert Peers(None, tmp_path).vllm() == []
    with pytest.raises(ValueError, match="neither"):
        Peers(tmp_path, tmp_path)
    python = tmp_path / "llama" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "model.gguf").touch()
    peers = Peers(tmp_path, tmp_path)
    assert [each.name for each in peers.llama_for_prompts()] == ["llama.cpp F16", "llama.cpp Q4_0", "llama.cpp Q8_0"]
    assert peers.vllm() == peers.transformers() == []
