"""Times without the pauses in between."""

import time

import pytest

from forge.trace.pauses import Pauses
from tests.trace.runs import crowded

STEP = crowded().steps[0]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def paused(clock, *spans) -> Pauses:
    pauses = Pauses()
    for start, end in spans:
        clock[0] = start
        with pauses.pause():
            clock[0] = end
    return pauses


def test_moments_move_by_the_pauses_before_them(clock):
    pauses = paused(clock, (10, 15), (20, 21))
    assert [pauses.without(moment) for moment in (9, 15, 18, 21, 30)] == [9, 10, 13, 15, 24]


def test_steps_and_metrics_are_moved_and_keep_their_lengths(clock):
    base = STEP.started - 5
    pauses = paused(clock, (base, base + 3))
    moved = pauses.step(STEP)
    assert moved.started == pytest.approx(STEP.started - 3) and moved.ended == pytest.approx(STEP.ended - 3)
    assert [one.arrived for one in moved.arrived] == pytest.approx([one.arrived - 3 for one in STEP.arrived])
    metrics = next(iter(crowded().outputs.values())).metrics
    assert pauses.metrics(metrics).time_to_first_token_ms == pytest.approx(metrics.time_to_first_token_ms)


def test_without_pauses_nothing_moves():
    assert Pauses().step(STEP) == STEP
