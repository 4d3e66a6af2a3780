"""Ctrl-C anywhere: an exception between any two lines of a step leaves an engine that can abort, answer and go on.

`interrupted_at(n, call)` raises KeyboardInterrupt before the n-th line that `call` executes in the packages that a step
runs, by way of Python's own tracing, so every place is tried and not only those that somebody thought of.
"""

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType

import numpy as np
import pytest

import forge
from forge.engine.engine import Engine
from forge.engine.sampling_params import SamplingParams
from forge.run import Run
from tests.engine.scripted import assert_nothing_held, complete, letters, muddled, new_engine, run_all
from tests.slow import every

PACKAGES = tuple(
    str(Path(forge.__file__).parent / name)
    for name in ("engine", "cache", "speculation", "trace", "tokenizer", "grammar")
)

REQUESTS = {
    "ends first": ("ab", SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=2, logprobs=1)),
    "samples": ("hello", SamplingParams(max_tokens=6, temperature=1.0, seed=7, n=2, stop=["e", "qa"])),
    "joins": ("abc", SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2)),
}
STEPS_BEFORE = {"admits all that fit": 0, "only decodes": 1, "ends one": 2, "admits the one that waited": 3}

Place = tuple[str, int]
"""A file and a line of it."""


def belongs_to_a_step(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGES)


def interrupted_at(
    line: int, call: Callable[[], object], counts: Callable[[CodeType], bool] = belongs_to_a_step
) -> bool:
    """Whether `call` came as far as that line, where KeyboardInterrupt then ended it.

    counts: whose lines are counted.
    """
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if not counts(frame.f_code):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before, handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)  # the interrupted line may be one that sets it
    return False


def lines_of(call: Callable[[], object]) -> int:
    """How many lines there are to be interrupted at."""
    return len(places_of(call))


def places_of(call: Callable[[], object]) -> list[Place]:
    """The lines that `call` executes, in order."""
    places: list[Place] = []

    def trace(frame, event, argument):
        if not belongs_to_a_step(frame.f_code):
            return None
        if event == "line":
            places.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return places


def busy_engine(kv: str, steps: int, max_num_seqs: int = 3) -> tuple[Engine, Run]:
    """Three requests, four sequences, room for three; `steps` steps done. The last shares letters with another."""
    engine = new_engine(muddled, kv=kv, max_num_seqs=max_num_seqs)
    ids = {name: engine.add_request(name, letters(text), params) for name, (text, params) in REQUESTS.items()}
    run = Run(engine, list(ids.items()))
    for _ in range(steps):
        engine.step()
    return engine, run


def lines_to_try(kv: str, steps: int, last: bool) -> list[int]:
    """Where to interrupt a step so that all steps of `STEPS_BEFORE` together have every line of the source interrupted
    once, where it is executed first or last in a step."""
    places = {case: places_of(busy_engine(kv, case)[0].step) for case in STEPS_BEFORE.values()}
    lines = {case: {place: line for line, place in enumerate(places[case])} for case in places}
    chosen = []
    for place, last_line in lines[steps].items():
        cases = [case for case in lines if place in lines[case]]
        if cases[place[1] % len(cases)] == steps:
            chosen.append(last_line if last else places[steps].index(place))
    return chosen


def results(run: Run) -> list:
    """All that a caller sees of each sample."""
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, output.prompt_logprobs)
        for output in run.outputs
        for one in output.outputs
    ]


def uninterrupted(kv: str) -> list:
    _, run = busy_engine(kv, 0)
    assert len(list(run)) > max(STEPS_BEFORE.values()) + 1
    return results(run)


def is_beginning(shorter: tuple, whole: tuple) -> bool:
    tokens, text, reason, _, logprobs, _ = shorter
    return (
        whole[0][: len(tokens)] == tokens
        and (whole[1].startswith(text) or reason == "abort")  # an abort shows what a stop string would have swallowed
        and (logprobs is None or whole[4][: len(tokens)] == logprobs)
    )


@every(5)
@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
@pytest.mark.parametrize("steps", STEPS_BEFORE.values(), ids=STEPS_BEFORE)
def test_an_interrupted_step_can_be_aborted_and_the_engine_used_again(kv, steps, stride):
    expected = uninterrupted(kv)
    after = complete(new_engine(muddled, kv=kv), "again", max_tokens=5, ignore_eos=True)
    for line in lines_to_try(kv, steps, last=False)[steps % stride :: stride]:
        engine, run = busy_engine(kv, steps)
        assert interrupted_at(line, engine.step), f"line {line}"

        run.abort()

        for sample, whole in zip(results(run), expected, strict=True):
            assert is_beginning(sample, whole), f"line {line}: {sample} {whole}"
            assert sample[2] is not None
        assert_nothing_held(engine)
        again = complete(engine, "again", max_tokens=5, ignore_eos=True)
        assert (again.token_ids, again.text) == (after.token_ids, after.text), f"line {line}"


@every(5)
@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
@pytest.mark.parametrize("steps", STEPS_BEFORE.values(), ids=STEPS_BEFORE)
def test_an_interrupted_step_can_be_gone_on_from_as_if_nothing_had_happened(kv, steps, stride):
    expected = uninterrupted(kv)
    for line in lines_to_try(kv, steps, last=True)[steps % stride :: stride]:
        engine, run = busy_engine(kv, steps)
        assert interrupted_at(line, engine.step)

        assert not engine._requests or run.outputs
        engine.scheduler.check_invariants()
        for _ in run:
            engine.scheduler.check_invariants()

        assert results(run) == expected, f"line {line}"
        assert_nothing_held(engine)


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_interrupted_again_and_again_it_still_comes_to_the_same_end(kv):
    expected = uninterrupted(kv)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        engine, run = busy_engine(kv, 0)
        while engine.has_unfinished():
            while interrupted_at(int(rng.integers(6000)), engine.step) and engine.has_unfinished():
                interrupted_at(int(rng.integers(600)), partial(engine.output, "joins"))  # while it recovers
            engine.output("joins")
            engine.scheduler.check_invariants()

        assert results(run) == expected, f"seed {seed}"
        assert_nothing_held(engine)


@pytest.mark.parametrize("steps", STEPS_BEFORE.values(), ids=STEPS_BEFORE)
def test_a_question_after_an_interruption_changes_nothing_and_is_answered_as_after_the_recovery(steps):
    def answers(engine: Engine) -> tuple:
        return engine.has_unfinished(), *map(engine.is_unfinished, REQUESTS), *map(engine.is_retained, range(4))

    lines, num_reached = lines_to_try("paged", steps, last=True)[::7], 0
    for line in lines:
        engine, _ = busy_engine("paged", steps)
        engine._requests["ends first"].sequences[0].retain_cache = True
        if not interrupted_at(line, engine.step):
            continue  # a step that retains a cache may have fewer lines
        num_reached += 1
        was_interrupted = engine.operation.unfinished
        before = answers(engine)
        assert engine.operation.unfinished == was_interrupted, "a question has recovered"
        engine.output("joins")
        assert answers(engine) == before, f"line {line}"
    assert num_reached > 0.8 * len(lines)


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_an_interrupted_abort_can_be_repeated(kv):
    def abort_all(engine: Engine) -> None:
        for name in REQUESTS:
            engine.abort(name)

    lines = lines_of(partial(abort_all, busy_engine(kv, 2)[0]))
    for line in range(lines):
        engine, run = busy_engine(kv, 2)
        assert interrupted_at(line, partial(abort_all, engine))

        run.abort()

        assert all(sample[2] in ("abort", "stop", "length") for sample in results(run))
        assert_nothing_held(engine)


def test_reading_an_output_can_be_interrupted_anywhere_and_repeated():
    def read_all(engine: Engine) -> None:
        for name in REQUESTS:
            engine.output(name)

    expected = uninterrupted("paged")
    for line in range(0, lines_of(partial(read_all, busy_engine("paged", 4)[0])), 5):
        engine, run = busy_engine("paged", 4)
        assert interrupted_at(line, partial(read_all, engine))

        read_all(engine)
        for _ in run:
            engine.scheduler.check_invariants()

        assert results(run) == expected, f"line {line}"
        assert_nothing_held(engine)


@pytest.mark.parametrize("place", ["forward", "copy_blocks", "on_logits"])
def test_nothing_stays_held_when_the_forward_is_interrupted(place):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    steps, max_num_seqs = (0, 4) if place == "copy_blocks" else (1, 3)  # the first step copies blocks for a sample
    engine, run = busy_engine("basic", steps, max_num_seqs)
    owner = {"forward": engine.model, "copy_blocks": engine.storage, "on_logits": engine}[place]
    original = getattr(owner, place)
    setattr(owner, place, [interrupt] if place == "on_logits" else interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    setattr(owner, place, original)

    assert engine.has_unfinished()
    engine.output("joins")
    engine.scheduler.check_invariants()
    assert engine.cache.stats().used_blocks == 0
    run_all(engine)
    assert results(run) == uninterrupted("basic")


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_an_interrupted_add_leaves_a_whole_request_or_none(kv):
    expected = uninterrupted(kv)
    params = SamplingParams(max_tokens=5, n=2, temperature=1.0, seed=1)

    def add(engine: Engine) -> None:
        engine.add_request("late", letters("late"), params)

    engine, _ = busy_engine(kv, 2)
    lines = lines_of(partial(add, engine))
    list_of_late = [one.token_ids for one in [*run_all(engine), engine.output("late")][-1].outputs]
    for line in range(lines):
        engine, run = busy_engine(kv, 2)
        assert interrupted_at(line, partial(add, engine))

        assert engine.has_unfinished()
        engine.output("joins")  # recovers
        engine.scheduler.check_invariants()
        if "late" not in engine._requests:
            add(engine)  # the id is free
        run_all(engine)

        assert results(run) == expected, f"line {line}"
        assert [one.token_ids for one in engine.output("late").outputs] == list_of_late, f"line {line}"
        engine.forget("late")
        assert_nothing_held(engine)


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_an_interrupted_release_or_forget_can_be_repeated(kv):
    def ended() -> tuple[Engine, int]:
        engine = new_engine(muddled, kv=kv)
        (seq_id,) = engine.add_request("first", letters("hello"), SamplingParams(max_tokens=3), retain_cache=True)
        run_all(engine)
        return engine, seq_id

    def end(engine: Engine, seq_id: int) -> None:
        engine.release(seq_id)
        engine.forget("first")

    for line in range(lines_of(partial(end, *ended()))):
        engine, seq_id = ended()
        assert interrupted_at(line, partial(end, engine, seq_id))
        engine.release(seq_id)
        if "first" in engine._requests:
            engine.forget("first")
        assert_nothing_held(engine)


@pytest.mark.parametrize("kv", ["basic", "paged", "prefix"])
def test_an_interrupted_fork_of_a_retained_cache_leaves_the_count_of_ended_sequences(kv):
    def ended() -> tuple[Engine, int]:
        engine = new_engine(muddled, kv=kv)
        (seq_id,) = engine.add_request("first", letters("hello"), SamplingParams(max_tokens=3), retain_cache=True)
        run_all(engine)
        return engine, seq_id

    engine, seq_id = ended()
    lines = lines_of(partial(engine.fork_retained, seq_id))
    assert engine.scheduler.num_finished == 1 and lines > 5
    for line in range(lines):
        engine, seq_id = ended()
        assert interrupted_at(line, partial(engine.fork_retained, seq_id))

        assert not engine.has_unfinished()
        engine.output("first")  # recovers
        assert engine.scheduler.num_finished == 1, f"line {line}"
        (next_id,) = engine.add_request("next", letters("ab"), SamplingParams(max_tokens=2))
        run_all(engine)
        assert engine.scheduler.num_finished == 2 and next_id > seq_id, f"line {line}"
