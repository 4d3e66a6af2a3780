"""The experiments of chapter 6."""

import json

import pytest

from forge.cli.main import main
from forge.cli.options import parse_numbers
from forge.errors import UsageError


def test_a_budget_bounds_the_rows_between_two_tokens_and_whole_prompts_do_not(capfd):
    assert main(["batching", "--only", "run", "--budgets", "64,32", "-m", "hash", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [found[name]["budget"] for name in ("chunks_32", "chunks_64", "whole")] == [32, 64, None]
    assert found["chunks_32"]["rows"]["maximum"] == 32 and found["chunks_64"]["rows"]["maximum"] == 64
    assert found["whole"]["rows"]["maximum"] > found["prompt_tokens"] == 400
    assert found["chunks_32"]["num_steps"] > found["chunks_64"]["num_steps"]


@pytest.mark.parametrize("text", ["", "32,", "0", "-1", "32;64", "many"])
def test_budgets_and_loads_that_are_no_numbers_are_refused(text):
    with pytest.raises(UsageError, match="such as 32,128"):
        parse_numbers(text, "--budgets", "32,128")


def test_the_table_of_budgets_fits_80_columns(capfd):
    assert main(["batching", "--only", "run", "--budgets", "32", "-m", "hash"]) == 0
    out = capfd.readouterr().out
    assert "whole prompts" in out and max(map(len, out.splitlines())) <= 80


def test_requests_wait_longer_as_the_load_grows_and_alike_on_every_machine(capfd):
    facts = []
    for _ in range(2):
        assert main(["batching", "--only", "run", "--loads", "95,50", "-m", "hash", "-n", "60", "--json"]) == 0
        facts.append(json.loads(capfd.readouterr().out))
    queued = [[run["waited_steps"] for run in found["runs"]] for found in facts]
    assert queued[0] == queued[1], "steps do not depend on the machine"
    idle, loaded = facts[0]["runs"]
    assert (idle["load"], loaded["load"]) == (50, 95)
    assert idle["waited_steps"]["p50"] == 0 and loaded["waited_steps"]["p99"] > idle["waited_steps"]["p99"] + 5
    assert loaded["busy_slots"] > 1.3 * idle["busy_slots"] and loaded["busy_slots"] <= facts[0]["slots"]
