"""Chapter 12's exercises: each answer holds for what its command measures."""

import json

import pytest

from forge.cli.main import main
from forge.experiments.cluster.failure import num_identical

COMMAND = ("cluster", "--only", "run", "--json")


@pytest.fixture
def measured(capfd):
    def run(*options: str) -> dict:
        assert main((*COMMAND, *options)) == 0
        return json.loads(capfd.readouterr().out)

    return run


def test_exercise_1_without_a_threshold_the_prefix_router_is_round_robin(measured):
    prefix = measured("--router", "prefix", "--threshold", "0")["routers"]["prefix"]
    turns = measured("--router", "round-robin")["routers"]["round_robin"]
    assert 0.8 < prefix["tokens_computed"] / turns["tokens_computed"] < 1.1
    assert prefix["reasons"]["holder_busy"] > 16


def test_exercise_2_the_estimate_believes_in_blocks_that_are_gone(measured):
    found = measured("--num-blocks", "64")["routers"]
    events, estimate = (found[name]["believed_wrongly"] for name in ("prefix", "prefix_estimate"))
    assert estimate > 24 and events < estimate / 2


def test_exercise_3_with_four_engines_round_robin_computes_more_and_the_prefix_router_does_not(measured):
    two, four = (
        measured("--replicas", number, "--router", "round-robin", "--router", "prefix")["routers"] for number in "24"
    )
    assert four["round_robin"]["over_one_engine"] > two["round_robin"]["over_one_engine"] + 0.3
    assert four["prefix"]["over_one_engine"] < 1.1


def test_too_few_requests_are_refused(capfd):
    assert main(("cluster", "--only", "run", "--requests", "2")) == 2
    assert "--requests is at least 4" in capfd.readouterr().err


def test_an_unknown_router_is_refused(capfd):
    assert main(("cluster", "--only", "run", "--router", "best")) == 2
    assert "unknown router 'best'" in capfd.readouterr().err


def test_requests_that_fail_both_times_are_not_identical():
    assert num_identical(["a", "b", "c", ""], ["a", "x", "", ""]) == 1
