"""What the chapters give as answers to their exercises is so: each exercise is run, and its figures are read."""

import json
import re
import shlex

import pytest

from forge.book.catalog import find
from forge.cli.main import main
from forge.experiments import kernels

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
def facts(capfd, monkeypatch):
    """Run a command line and return what it prints with `--json`. No answer is a time, so nothing is timed twice."""
    monkeypatch.setattr("forge.cli.arrivals.TIMES", 1)
    monkeypatch.setattr("forge.experiments.repeated_run.REPEATS", 1)

    def run(line: str) -> dict:
        main([*shlex.split(line)[1:], "--json"])
        return json.loads(capfd.readouterr().out)

    return run


@pytest.mark.slow
def test_chapter_1(facts):
    rows, keys, threads = exercises(1)
    found = facts(rows)
    assert found["tokens_computed"] == 2272 and found["distinct_tokens"] == 67
    met = {}
    for line in ('forge naive --only run "Once upon a time" 128', keys):
        computed = [forward["tokens_computed"] for forward in facts(line)["forwards"]]
        met[len(computed)] = sum(tokens * (tokens + 1) / 2 for tokens in computed) / sum(computed)
    assert round(met[128]) == 44 and round(met[32]) == 12
    both = facts(threads)
    assert both["identical"] and both["logits_same_bits"]


def test_chapter_2(facts):
    long, precision, bytes_each, judge = exercises(2)
    assert facts(long)["held_bytes"] == 259 * 3264
    for exercise, bytes_per_token in ((precision, 12288), (bytes_each, 6144)):
        compared = facts(exercise)
        eight, more = compared["sides"]
        assert more["kv_bytes_held"] / eight["kv_bytes_held"] == bytes_per_token / 3264
        assert not compared["logits_same_bits"]
    without, basic = facts(judge)["sides"]
    assert len(without["forwards"]) == len(basic["forwards"]) == 1
    assert without["tokens_computed"] == basic["tokens_computed"]


def test_chapter_3(facts, monkeypatch):
    quick = {"SHAPE_LAYERS": 1, "ROUND_SECONDS": 0.0005, "LIMIT_SECONDS": 0.01, "ARRAY_BYTES": 1 << 22}
    for name, value in quick.items():
        monkeypatch.setattr(kernels, name, value)
    limits, one_thread, coarse = exercises(3)
    found = facts(limits)
    for model in found["models"]:
        turning = found["ridge"] / model["passes"][0]["intensity"]
        for some in model["passes"]:
            assert some["bound"] == "memory" or some["rows"] > turning
            assert some["bound"] == "arithmetic" or some["rows"] < 1.5 * turning
    (single,) = facts(one_thread)["models"]
    assert single["threads"] == 1
    for name in ("bytes_read", "products"):
        assert [one[name] for one in single["passes"]] == [one[name] for one in found["models"][0]["passes"]]
    assert facts(coarse)["identical"] is False


@pytest.mark.slow
def test_chapter_4(facts):
    larger_blocks, small_pool, wrong_order = exercises(4)
    plain, larger = facts("forge paged --only run"), facts(larger_blocks)
    single = facts("forge paged --only run --block-size 1 --num-blocks 1024")
    assert min(plain["lengths"]) == 19 and plain["lengths"] == larger["lengths"] == single["lengths"]
    assert 0.28 < larger["paged"]["internal_fragmentation"] < 0.4 and single["paged"]["internal_fragmentation"] == 0
    small = facts(small_pool)
    assert small["blocks_per_run"] == 16 and small["basic"]["most_running"] == 1
    assert small["paged"]["most_running"] == 6 and small["paged"]["preempted"] > 0
    assert facts(wrong_order)["step"] == 2


def test_chapter_5(facts):
    between, eight, whole = exercises(5)
    story = facts(between)["story"]
    assert (story["hit_tokens"], len(story["hit_blocks"]), len(story["splits"])) == (32, 2, 2)
    rubric = facts(eight)["rubric"]
    first, *others = rubric["requests"]
    assert first["tokens_cached"] == 0 and 0.8 < rubric["hit_rate"] < 7 / 8
    assert all(request["tokens_cached"] >= rubric["tokens"] // 16 * 16 for request in others)
    assert all(request["tokens_cached"] == request["prompt_tokens"] - 1 for request in others[3:])
    found = facts(whole)
    assert found["sound"] and found["different"] > 0


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


def test_chapter_8(facts):
    two_words, planning, small_model = exercises(8)
    sides = facts(two_words)["sides"]
    assert sides[0]["blocks_held"] == sides[1]["blocks_held"] > 0 and sides[0]["steps"] == sides[1]["steps"]
    planned = facts(planning)
    assert sorted(side["tokens_cached"] for side in planned["sides"]) == [0, 1200]
    sweep = facts(small_model)
    assert sweep["identical"]


def test_chapter_9(facts):
    four_slots, small_pool, no_cache = exercises(9)
    crowded = facts(four_slots)
    assert crowded["metrics"]["most_running"] <= 4 and crowded["steps"]["batch_max"] == 4
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


def test_chapter_11(facts):
    words, capitals, mood, sentence = map(facts, exercises(11))
    record = facts("forge constrained --only run")
    assert words["places"][0]["allowed"] == 6 and words["given_up"] == 0 and words["text"] == "happy"
    assert capitals["given_up"] > 10
    assert mood["given_up_per_token"] > 2 * record["given_up_per_token"] and mood["record"] == {"mood": "happy"}
    assert mood["places"][0]["given_up"] == record["places"][0]["given_up"] > 0.4 * mood["given_up"]
    assert 0.8 < sentence["given_up"] / record["given_up"] < 1.2
    costly = {place["text"]: place["preferred"] for place in sentence["places"] if place["given_up"] > 5}
    assert costly == {"The": "happy", " was": "(end)", " happy": " afraid"}
