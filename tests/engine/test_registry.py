"""What an engine knows of its requests: what is refused, what an operation that never ended leaves, and the end of the
model."""

from functools import partial

import pytest

from forge.engine.sampling_params import SamplingParams
from forge.engine.task import Task
from forge.errors import UsageError
from forge.model.model import ModelUnavailable
from tests.engine.scripted import assert_nothing_held, letters, muddled, new_engine, run_all
from tests.engine.test_interruption import interrupted_at, lines_of
from tests.speculation.proposers import scripted_draft, speculator

ON = SamplingParams(max_tokens=5, ignore_eos=True)


def failing(engine, error: BaseException, step: int = 0) -> None:
    """Let the model's forward of that number, counted from now on, raise an error."""
    forward = engine.model.forward

    def fail(batch, storage):
        nonlocal step
        step -= 1
        if step < 0:
            engine.model.forward = forward
            raise error
        return forward(batch, storage)

    engine.model.forward = fail


def test_what_the_model_cannot_answer_is_refused_with_nothing_changed():
    engine = new_engine(muddled)
    with pytest.raises(UsageError, match="this model has no hidden states"):
        engine.add_request("r", letters("ab"), ON, task=Task(pooling="mean"))
    assert not engine.has_unfinished()
    engine.add_request("r", letters("ab"), ON)
    (rejected,) = engine.step().rejected
    assert rejected.request_id == "r" and "no hidden states" in rejected.message


def test_before_the_first_step_a_failure_is_everybodys():
    engine = new_engine(muddled)
    for name in "ab":
        engine.add_request(name, letters(name), ON)
    assert engine.fail_step() == ("a", "b") and not engine.has_unfinished()


def test_without_its_model_an_engine_ends_everything_lets_all_go_and_takes_no_more():
    drafts = [scripted_draft(name=name) for name in ("one", "other")]
    engine = new_engine(muddled, kv="paged", speculation=speculator(*drafts, k=2))
    for name in "ab":
        engine.add_request(name, letters(name), ON)
    engine.step()
    failing(engine, ModelUnavailable("it is gone"))
    record = engine.step()
    assert [(one.seq_id, one.reason, one.error) for one in record.finished] == [
        (0, "error", "it is gone"),
        (1, "error", "it is gone"),
    ]
    with pytest.raises(ModelUnavailable, match="it is gone"):
        engine.add_request("c", letters("c"), ON)
    for name in "ab":
        assert engine.output(name).outputs[0].errors == ("it is gone",)
        engine.forget(name)
    assert_nothing_held(engine)


def test_an_id_of_a_sequence_is_never_given_twice_wherever_an_arrival_was_interrupted():
    def add(engine, name: str) -> tuple[int, ...]:
        return engine.add_request(name, letters(name), SamplingParams(max_tokens=2, n=2))

    for line in range(lines_of(partial(add, new_engine(muddled), "a"))):
        engine = new_engine(muddled)
        assert interrupted_at(line, partial(add, engine, "a"))
        add(engine, "b")
        given = [seq_id for state in engine._requests.values() for seq_id in state.seq_ids]
        assert len(set(given)) == len(given)


def test_what_the_cache_noted_in_a_step_that_failed_is_in_no_record():
    engine = new_engine(muddled, kv="prefix")
    engine.add_request("first", letters("hello hello"), ON)
    run_all(engine)
    engine.add_request("second", letters("hello hello"), ON)
    failing(engine, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [record.events for record in run_all(engine)] == [()] * 5, "the cache is empty: there was no hit"
