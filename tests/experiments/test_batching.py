"""The experiments of chapter 6."""

import json

import pytest

from forge.cli.main import main
from forge.errors import UsageError
from forge.experiments.batching import parse_budgets


def test_a_budget_bounds_the_rows_between_two_tokens_and_whole_prompts_do_not(capfd):
    assert main(["batching", "--only", "run", "--budgets", "64,32", "-m", "hash", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [found[name]["budget"] for name in ("chunks_32", "chunks_64", "whole")] == [32, 64, None]
    assert found["chunks_32"]["rows"]["maximum"] == 32 and found["chunks_64"]["rows"]["maximum"] == 64
    assert found["whole"]["rows"]["maximum"] > found["prompt_tokens"] == 400
    assert found["chunks_32"]["num_steps"] > found["chunks_64"]["num_steps"]


@pytest.mark.parametrize("text", ["", "32,", "0", "-1", "32;64", "many"])
def test_budgets_that_are_no_numbers_are_refused(text):
    with pytest.raises(UsageError, match="such as 32,128"):
        parse_budgets(text)


def test_the_table_of_budgets_fits_80_columns(capfd):
    assert main(["batching", "--only", "run", "--budgets", "32", "-m", "hash"]) == 0
    out = capfd.readouterr().out
    assert "whole prompts" in out and max(map(len, out.splitlines())) <= 80
