"""How a run's samples ended, in words."""

from dataclasses import replace

from forge.reasons import PoolExhausted
from forge.trace.records import FinishRecord
from forge.views.json_output import run_object
from forge.views.summary import RunResult
from tests.trace.runs import crowded
from tests.views.records import LABEL


def test_a_sample_that_the_pool_ended_says_so():
    run = crowded(n=2)
    arrival = next(one for step in run.steps for one in step.arrived if one.request_id == "late-0")
    finish = FinishRecord(arrival.seq_ids[1], "length", why=PoolExhausted(16))
    steps = [replace(step, finished=tuple(_instead(one, finish) for one in step.finished)) for step in run.steps]
    result = RunResult(LABEL, tuple(steps), (run.outputs["late-0"],))
    assert result.endings == ("length", "length: the pool holds 16 tokens")
    assert result.ending == "length, length: the pool holds 16 tokens"
    found = run_object(result, str)
    assert [one["finish_reason"] for one in found["samples"]] == ["length", "length"]
    assert [one["finish"] for one in found["samples"]] == list(result.endings)


def _instead(one: FinishRecord, other: FinishRecord) -> FinishRecord:
    return other if one.seq_id == other.seq_id else one
