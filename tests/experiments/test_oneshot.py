"""The screen of chapter 8: both lives, and the steps of the second."""

import json

import pytest

from forge.cli.main import main


@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_steps_add_up_and_say_who_waits_for_whom(kv, capfd):
    assert main(["oneshot", "--json", "--model", "hash", "--requests", "20", "--kv", kv]) == 0
    facts = json.loads(capfd.readouterr().out)
    for side in facts["sides"]:
        steps = side["per_step"]
        assert len(steps) == side["steps"] and sum(step["answered"] for step in steps) == 20
        assert sum(step["rows"] for step in steps) == side["tokens_computed"]
        assert max(step["blocks_held"] for step in steps) == side["blocks_held"]
    first = facts["sides"][1]["per_step"][0]
    assert (first["answered"], first["deferred"]) == ((1, 19) if kv == "prefix" else (first["answered"], 0))
    assert facts["sides"][1]["blocks_held"] == 0 < facts["scratch_bytes"]


def test_the_screen_names_the_prefix_owner(capfd):
    assert main(["oneshot", "--only", "run", "--model", "hash", "--requests", "9", "--kv", "prefix"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and "8, while seq 0 computes their prefix" in out and "rows in a step  generation" in out
    assert max(map(len, out.splitlines())) <= 80
