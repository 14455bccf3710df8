import json
import sys

import pytest

from bench.engine.contestants import Contestant, read_peers
from bench.engine.tables import END, START, ratio, ratio_table, replace_between, speed_table
from bench.engine.workload import WORKLOADS

RESULTS = {("a", "32"): [20.0, 30.0, 90.0], ("b", "32"): [10.0, 10.0, 10.0], ("a", "prompt"): [2.0]}


def test_a_ratio_compares_only_what_was_measured_in_one_round():
    assert ratio(RESULTS, ("a", "32"), ("b", "32")) == "3.00 (2.00 to 9.00)"
    assert ratio(RESULTS, ("a", "32"), ("c", "32")) is None


def test_tables_have_a_row_for_each_contestant_and_dashes_for_what_is_missing():
    assert speed_table(RESULTS, ["a", "b"], ["32", "prompt"])[2:] == ["| a | 30 | 0.50 s |", "| b | 10 | – |"]
    assert ratio_table(RESULTS, ["a"], "b", ["32", "prompt"])[2:] == ["| a | 3.00 (2.00 to 9.00) | – |"]


def test_only_what_stands_between_the_marks_is_replaced():
    page = f"before\n{START}\nold\n{END}\nafter\n"
    assert replace_between(page, ["new"]) == f"before\n{START}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="missing"):
        replace_between("no marks", ["new"])


def test_prompts_are_the_same_each_time_and_of_the_wanted_size():
    workload = WORKLOADS["32"]
    assert workload.prompts() == workload.prompts()
    assert [len(prompt) for prompt in workload.prompts()] == [128] * 32


def test_a_peer_runs_with_the_workload_in_its_command(tmp_path):
    script = "import sys, json; print('noise'); print(json.dumps({'wall_s': 1.0, 'output_tokens_per_s': float(sys.argv[1])}))"
    peers = {"peer": {"command": [sys.executable, "-c", script, "{requests}"], "workloads": ["32"]}}
    (tmp_path / "peers.json").write_text(json.dumps(peers))
    (peer,) = read_peers(tmp_path / "peers.json")
    assert peer.is_peer
    assert (peer.takes("32"), peer.takes("64")) == (True, False)
    assert peer.run(WORKLOADS["32"])["output_tokens_per_s"] == 32


def test_a_peer_that_fails_says_so():
    peer = Contestant(name="peer", command=(sys.executable, "-c", "raise SystemExit('no model')"), is_peer=True)
    assert (peer.takes("32"), peer.takes("naive")) == (True, False)
    with pytest.raises(RuntimeError, match="peer: exit status 1: no model"):
        peer.run(WORKLOADS["32"])


@pytest.mark.parametrize("content", ["[]", '{"peer": {}}', '{"peer": {"command": [1]}}'])
def test_a_file_of_peers_that_is_wrong_is_refused(tmp_path, content):
    (tmp_path / "peers.json").write_text(content)
    with pytest.raises(ValueError, match=r"peers\.json"):
        read_peers(tmp_path / "peers.json")
