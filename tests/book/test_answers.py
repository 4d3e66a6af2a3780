"""What the chapters give as answers to their exercises is so: each exercise is run, and its figures are read."""

import json
import re
import shlex

import pytest

from forge.book.catalog import find
from forge.cli.main import main

FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def exercises(number: int) -> list[str]:
    """The commands of a chapter's exercises."""
    text = find(str(number)).path.read_text(encoding="utf-8")
    return [
        line
        for block in FENCE.findall(text.split("## Exercises\n")[1].split("\n## ")[0])
        for line in block.split("\n")
        if line
    ]


@pytest.fixture
def facts(capfd):
    """Run a command line and return what it prints with `--json`."""

    def run(line: str) -> dict:
        main([*shlex.split(line)[1:], "--json"])
        return json.loads(capfd.readouterr().out)

    return run


def test_chapter_7(facts):
    twelve, seeded, classic, revoked = exercises(7)
    found = facts(twelve)
    by_position = found["accepted_by_position"]
    assert len(by_position) == 12 and by_position == sorted(by_position, reverse=True)
    assert by_position[-1] < found["draft_cost"] + 0.5, "the last positions are the ones that seldom pay"
    assert facts(seeded)["identical"] is True
    assert facts(classic)["identical"] is None, "another text of the same distribution: there is nothing to compare"
    alone = facts(revoked)
    assert alone["identical"] is True and alone["errors"] and alone["tokens_per_pass"] >= 1


def test_chapter_6(facts):
    swapping, small_budget, forgotten = exercises(6)
    plain = facts("forge trace-scheduler --requests 12 --num-blocks 20")["totals"]
    swapped = facts(swapping)["totals"]
    assert plain["tokens_recomputed"] > 0 == swapped["tokens_recomputed"] and swapped["swaps"] > 0
    assert plain["tokens_computed"] - swapped["tokens_computed"] == plain["tokens_recomputed"]
    limited = facts(small_budget)["totals"]
    assert limited["steps_by_class"]["mixed"] > plain["steps_by_class"]["mixed"]
    found = facts(forgotten)
    assert found["caught_by"] == "tokens" and found["different"] > 0 and found["message"] is None


def test_chapter_8(facts):
    two_words, planning, small_model = exercises(8)
    sides = facts(two_words)["sides"]
    assert sides[0]["blocks_held"] == sides[1]["blocks_held"] > 0 and sides[0]["steps"] == sides[1]["steps"]
    planned = facts(planning)
    assert sorted(side["tokens_cached"] for side in planned["sides"]) == [0, 1216]
    sweep = facts(small_model)
    assert sweep["identical"]


def test_chapter_9(facts):
    four_slots, small_pool, no_cache = exercises(9)
    crowded = facts(four_slots)
    assert crowded["metrics"]["most_running"] <= 4 and crowded["steps"]["batch_max"] == 4
    assert crowded["first_ms"]["max"] > crowded["alone"]["end_to_end_ms"], "the last waits for the stories before it"
    preempted = facts(small_pool)
    assert preempted["identical"] and preempted["steps"]["preemptions"] > 0
    uncached = facts(no_cache)
    assert uncached["identical"] and uncached["steps"]["rows"] > 10 * uncached["steps"]["seen"]


def test_chapter_10(facts):
    with_prefix, floors, _ = exercises(10)
    steps = facts(floors)["steps"]
    one, many = steps["decode1_160"], steps["decode64_160"]
    row_ms = (many["floor_ms"] - one["floor_ms"]) / 63
    assert one["bound"] == many["bound"] == "memory" and 1e3 * row_ms == pytest.approx(3.8, abs=0.1)
    assert len(facts(with_prefix)["steps"]) == 4
