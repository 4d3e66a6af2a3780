"""Requests from a seed, their arrivals, and the ways of running them: the same tokens whichever way."""

import random

import pytest

from forge import LLM
from forge.errors import UsageError
from forge.workload.requests import Arrival, Range, Request, Workload, WorkloadRun, make_workload
from forge.workload.ways import identical, measure
from tests.engine.scripted import muddled, new_engine
from tests.small_models import write_small_qwen3


class Letters:
    def encode(self, text):
        return [1 + ord(character) % 26 for character in text]


def workload(number=6, **options) -> Workload:
    return make_workload(Letters(), number, Range(2, 6), Range(3, 7), **options)


def engine(**options):
    return new_engine(muddled, kv="paged", block_size=2, **options)


def tokens(run: WorkloadRun) -> list[tuple[int, ...]]:
    list(run)
    return [output.outputs[0].token_ids for output in run.outputs]


def test_the_same_seed_makes_the_same_requests():
    assert workload(seed=3) == workload(seed=3) != workload(seed=4)
    plain, urgent = workload(), workload(priorities=True)
    assert [one.prompt_token_ids for one in plain.requests] == [one.prompt_token_ids for one in urgent.requests]
    assert {one.priority for one in plain.requests} == {0} < {one.priority for one in urgent.requests}


def test_lengths_lie_in_their_ranges():
    found = workload(200).requests
    assert {len(one.prompt_token_ids) for one in found} == set(range(2, 7))
    assert {one.max_tokens for one in found} == set(range(3, 8))


@pytest.mark.parametrize("text", ["", "x", "0", "5:3", "1:2:3", "-1", ":4"])
def test_a_range_without_meaning_is_refused(text):
    with pytest.raises(UsageError, match="--prompt-tokens"):
        Range.parse(text, "--prompt-tokens")


@pytest.mark.parametrize("text", ["", "poisson", "poisson:", "poisson:0", "poisson:nan", "every:-1", "often:3"])
def test_an_arrival_without_meaning_is_refused(text):
    with pytest.raises(UsageError, match="--arrival is all"):
        Arrival.parse(text)


def test_arrivals():
    rng = random.Random(0)
    assert Arrival.parse("all").times(3, rng) == [0, 0, 0]
    assert Arrival.parse("every:0.5").times(4, rng) == [0, 0.5, 1, 1.5]
    times = Arrival.parse("poisson:20").times(4000, rng)
    assert times == sorted(times) and times[-1] == pytest.approx(200, rel=0.1)


def test_requests_come_in_the_step_that_was_asked_for():
    run = WorkloadRun(engine(), workload(4, arrival=Arrival.parse("every:2")))
    came = [step.step for step in run for _ in step.arrived]
    assert came == [1, 3, 5, 7]


def test_while_nothing_runs_steps_are_skipped():
    run = WorkloadRun(engine(), workload(3, arrival=Arrival.parse("every:50")))
    assert len(tokens(run)) == 3


def test_a_static_batch_begins_when_the_one_before_has_ended():
    run = WorkloadRun(engine(), workload(6), together=2)
    running: set[int] = set()
    for step in run:
        if step.admitted:
            assert not running
        running |= {one.seq_id for one in step.admitted}
        running -= {one.seq_id for one in step.finished}


def test_every_way_gives_the_same_tokens():
    alone = [tokens(WorkloadRun(engine(), Workload((one,))))[0] for one in workload().requests]
    assert tokens(WorkloadRun(engine(), workload())) == alone
    assert tokens(WorkloadRun(engine(), workload(), together=3)) == alone
    assert tokens(WorkloadRun(engine(num_blocks=8), workload())) == alone


def test_a_request_that_can_never_run_is_refused_and_the_others_go_on():
    requests = (Request((1,) * 99, 3), Request((1, 2), 3))
    run = WorkloadRun(engine(), Workload(requests))
    assert len(tokens(run)) == 1 and run.refused[0][0] == 0 and "99 tokens" in run.refused[0][1]


def test_an_aborted_run_keeps_what_there_is_and_leaves_nothing_behind():
    own = engine()
    run = WorkloadRun(own, workload(arrival=Arrival.parse("every:2")))
    for step in run:
        if step.step == 3:
            run.abort()
    assert [output.outputs[0].finish_reason for output in run.outputs] == ["length", "abort"]  # the first was short
    assert not own.has_unfinished() and own._requests == {} and own.cache.stats().used_blocks == 0


def test_ways_are_measured_on_engines_of_their_own(tmp_path):
    llm = LLM(write_small_qwen3(tmp_path / "small.gguf"), kv="paged", device="reference")
    few = make_workload(llm.tokenizer, 3, Range(2, 2), Range(2, 4))
    ways = [
        measure(llm, few, how, batch, turns=2) for how, batch in (("sequential", 1), ("static", 2), ("continuous", 2))
    ]
    assert identical(ways) and all(len(one.all_seconds) == 2 for one in ways)
    assert [one.totals.batch[1] for one in ways] == [1, 2, 2]
    assert ways[0].totals.output_tokens == few.output_tokens == sum(map(len, ways[0].tokens))
    assert not llm.engine._requests
