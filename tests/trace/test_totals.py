"""The totals of a run, from its records alone."""

from types import SimpleNamespace

import pytest

from forge.trace.timeline import timeline_of
from forge.trace.totals import percentile, times_overtaken, totals_of
from tests.trace.runs import crowded


def test_the_totals_of_a_run():
    run = crowded()
    requests = timeline_of(run.steps, run.ends).requests()
    totals = totals_of(run.steps, requests)
    assert sum(totals.steps_by_class.values()) == totals.num_steps == len(run.steps)
    assert totals.output_tokens == sum(len(one.tokens) for one in run.steps)
    assert totals.ended == {"length": 6, "abort": 1} and totals.rejected == 1 and totals.pool_exhausted == 0
    assert totals.preemptions == sum(one.times_preempted for one in requests) > 0
    assert totals.tokens_recomputed > 0 and totals.swaps == 0
    assert totals.end_to_end.count == 6 and totals.end_to_end.p50 <= totals.end_to_end.p99 <= totals.end_to_end.maximum


def test_percentiles_lie_between_neighbours():
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([5], 0.99) == 5
    assert percentile(range(101), 0.9) == 90


@pytest.mark.parametrize(
    ("admitted", "overtaken"),
    [
        ((0.0, 1.0, 2.0, 3.0), [0, 0, 0, 0]),
        ((3.0, 1.0, 2.0, 4.0), [2, 0, 0, 0]),
        ((None, 1.0, 2.0, 1.5), [3, 0, 1, 0]),
        ((1.0, 1.0, 1.0, 1.0), [0, 0, 0, 0]),
    ],
)
def test_a_request_is_overtaken_by_later_ones_that_begin_before_it(admitted, overtaken):
    requests = [
        SimpleNamespace(arrived=0.0, seq_id=number, admitted=when, sample=0) for number, when in enumerate(admitted)
    ]
    assert times_overtaken(requests) == overtaken
