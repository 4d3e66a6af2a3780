"""The export is what the Trace Event Format says: tracks with names, slices that nest, counters that are numbers."""

import json
from collections import defaultdict

import pytest

from forge.trace.perfetto import ENGINE, SEQUENCES, perfetto_object
from forge.trace.recorder import Trace
from tests.trace.runs import HEADER, crowded


@pytest.fixture(params=["recompute", "swap"])
def events(request):
    run = crowded(request.param)
    found = perfetto_object(Trace(HEADER, run.steps, run.ends))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found["traceEvents"]


def test_every_event_has_what_its_phase_needs(events):
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) for value in event["args"].values())


def test_a_track_per_sequence_and_counters_for_blocks_and_queues(events):
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = {event["tid"] for event in events if event["pid"] == SEQUENCES and event["ph"] == "X"}
    assert tracks <= named.keys() and len(tracks) == 7  # the refused one has none
    assert {event["name"] for event in events if event["ph"] == "C"} == {"blocks", "queues", "rows"}
    blocks = [event["args"] for event in events if event["name"] == "blocks"]
    assert all(sum(values.values()) == 8 for values in blocks)


def test_slices_of_a_track_follow_one_another_or_lie_within(events):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= start + 1e-3:  # a nanosecond
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)
    assert (ENGINE, 1) in tracks


def test_waits_and_preemptions_say_why(events):
    waits = [event for event in events if event["name"].startswith("waits: ")]
    assert waits and all("waited" in event["args"]["why"] for event in waits)
    assert any(event["name"] == "preempted" for event in events)
