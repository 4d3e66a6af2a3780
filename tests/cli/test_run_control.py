"""A run that the command line drives: to its end, at a reader's keys, or until they have had enough."""

import time
from dataclasses import replace

import pytest

from forge import LLM, SamplingParams
from forge.cli.run_control import StepSubscriber, drive
from forge.views import stepper

PAUSE = 0.02
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


class ScriptedStepper:
    """A reader who looks at each step for a while, and leaves after so many."""

    def __init__(self, steps: int):
        self.steps, self.seen = steps, 0

    def __call__(self, console, history):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def asks_for_another(self, interrupted) -> bool:
        time.sleep(PAUSE)
        self.seen += 1
        return self.seen < self.steps

    def ended(self, interrupted) -> None:
        self.seen = -1


class KeptRun:
    """A run that keeps its records as the engine made them."""

    def __init__(self, run):
        self.run, self.records = run, []

    def __iter__(self):
        for record in self.run:
            self.records.append(record)
            yield record

    def __getattr__(self, name):
        return getattr(self.run, name)


def stepped_through(monkeypatch, steps: int):
    reader, subscriber, seen = ScriptedStepper(steps), StepSubscriber(), []
    monkeypatch.setattr(stepper, "Stepper", reader)
    subscriber.steps = True
    llm = LLM("hash", kv="paged")
    run = KeptRun(llm.start([[1, 2, 3]], PARAMS))
    result = drive(llm, run, seen.append, subscriber)
    assert seen == list(result.records)
    return reader, run, result


def test_a_reader_who_leaves_has_interrupted_the_run_and_made_no_error(monkeypatch):
    reader, _, result = stepped_through(monkeypatch, 3)
    assert (reader.seen, len(result.records), result.interrupted, result.left) == (3, 3, True, True)
    assert result.output.outputs[0].finish_reason == "abort"


def test_a_run_that_was_stepped_through_to_its_end_is_whole(monkeypatch):
    reader, _, result = stepped_through(monkeypatch, 100)
    assert (reader.seen, len(result.records), result.interrupted, result.left) == (-1, 6, False, False)


def test_times_are_without_those_for_which_a_reader_looked(monkeypatch):
    _, run, result = stepped_through(monkeypatch, 100)
    for index, (record, raw) in enumerate(zip(result.records, run.records, strict=True)):
        assert raw.started - record.started >= index * PAUSE
        assert record.ended - record.started == pytest.approx(raw.ended - raw.started)
    raw, metrics = run.outputs[0].metrics, result.output.metrics
    assert replace(metrics, last_token=raw.last_token) == raw and raw.last_token - metrics.last_token >= 5 * PAUSE
