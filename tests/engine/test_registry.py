"""What an engine knows of its requests: what is refused, what an operation that never ended leaves, and the end of the
model."""

from functools import partial
from unittest.mock import ANY

import pytest

from forge.engine.sampling_params import SamplingParams
from forge.engine.task import GENERATE, Task
from forge.errors import UsageError
from forge.model.model import ModelUnavailable
from tests.engine.scripted import assert_nothing_held, complete, letters, muddled, new_engine, run_all
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


def interrupt(*arguments):
    raise KeyboardInterrupt


def interrupted_commit(**params):
    """An engine with a request that ends with its second token, in a step that was interrupted once that was chosen,
    and one that goes on."""
    engine = new_engine(muddled, kv="paged")
    engine.add_request("ends", letters("ab"), SamplingParams(max_tokens=2, ignore_eos=True))
    engine.add_request("goes on", letters("cd"), SamplingParams(max_tokens=6, ignore_eos=True, stop=["xyz"], **params))
    engine.step()
    commit, engine.scheduler.commit = engine.scheduler.commit, interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.scheduler.commit = commit
    return engine


def test_tokens_that_an_interrupted_step_has_chosen_stand():
    engine = interrupted_commit(logprobs=1)
    assert [engine.is_unfinished(name) for name in ("ends", "goes on")] == [False, True] and engine.has_unfinished()
    ended = engine.output("ends").outputs[0]
    assert (len(ended.token_ids), ended.finish_reason) == (2, "length")
    assert engine.scheduler.num_finished == 1 and list(engine.scheduler.queue.sequences) == [1]
    assert engine._batch_builder._tables == {1: ANY}
    run_all(engine)
    whole = new_engine(muddled)
    whole.add_request("goes on", letters("cd"), engine._requests["goes on"].sequences[0].params)
    run_all(whole)
    found, expected = (each.output("goes on").outputs[0] for each in (engine, whole))
    assert (found.token_ids, found.text, found.logprobs) == (expected.token_ids, expected.text, expected.logprobs)
    engine.forget("ends")
    engine.forget("goes on")
    assert_nothing_held(engine)


def test_all_have_ended_if_a_step_that_was_interrupted_has_chosen_their_last_tokens():
    engine = new_engine(muddled)
    engine.add_request("only", letters("ab"), SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    engine.scheduler.commit = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.has_unfinished()


def test_what_was_chosen_is_applied_once_however_often_operations_are_interrupted():
    engine = interrupted_commit()
    for name in ("ends", "goes on"):
        engine.abort(name)
        engine.forget(name)
    engine.add_request("next", letters("ab"), ON)
    failing(engine, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    run_all(engine)
    alone = complete(new_engine(muddled), "ab", max_tokens=ON.max_tokens, ignore_eos=True)
    assert engine.output("next").outputs[0].token_ids == alone.token_ids


def test_ends_are_counted_once_and_caches_that_were_forked_are_none():
    engine = new_engine(muddled, kv="paged")
    (kept,) = engine.add_request("kept", letters("hello"), ON, retain_cache=True)
    run_all(engine)
    fork = engine.fork_retained(kept)
    assert (engine.is_retained(kept), engine.is_retained(fork), engine.fork_retained(99)) == (True, True, None)
    assert engine.add_request("next", letters("ab"), ON) == (2,)
    failing(engine, KeyboardInterrupt(), step=1)
    with pytest.raises(KeyboardInterrupt):
        run_all(engine)
    assert not engine.is_retained(kept)
    engine.output("next")
    assert engine.scheduler.num_finished == 1 and not engine.is_retained(kept)
    run_all(engine)
    assert engine.scheduler.num_finished == 2


@pytest.mark.parametrize("kv", ["basic", "paged", "prefix"])
def test_a_forked_cache_is_continued_like_the_first_and_a_released_one_is_not(kv):
    engine = new_engine(muddled, kv=kv, max_model_len=64)
    (kept,) = engine.add_request("kept", letters("hello"), ON, retain_cache=True)
    run_all(engine)
    prompt = [*letters("hello"), *engine.output("kept").outputs[0].token_ids, 3]
    fork = engine.fork_retained(kept)
    engine.release(kept)
    for name, continued, num_cached in (("b", fork, 9), ("c", kept, 0)):
        engine.add_request(name, prompt, ON, continues_from=continued, salt="" if name == "b" else "other")
        assert engine.step().admitted[0].num_cached == num_cached
        run_all(engine)
    assert len({engine.output(name).outputs[0].token_ids for name in "bc"}) == 1


def test_a_failed_step_ends_those_that_it_computed_and_no_others():
    engine = new_engine(muddled, max_num_seqs=1)
    for name in ("runs", "waits"):
        engine.add_request(name, letters("ab"), SamplingParams(max_tokens=4, n=1 + (name == "waits")))
    failing(engine, ArithmeticError(), step=1)
    with pytest.raises(ArithmeticError):
        run_all(engine)
    assert engine.fail_step() == ("runs",)
    run_all(engine)
    assert [one.finish_reason for one in engine.output("runs").outputs] == ["error"]
    assert engine.output("runs").outputs[0].errors == ()
    engine.add_request("fails before it is planned", letters("ab"), ON)
    engine.scheduler.schedule = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.fail_step() == ("fails before it is planned",), "and none that has ended"


def test_an_abort_ends_the_samples_that_have_not_ended():
    engine = new_engine(muddled)
    engine.add_request("r", letters("ab"), SamplingParams(max_tokens=9, temperature=1, seed=4, n=3, ignore_eos=True))
    engine.step()
    first, *others = engine._requests["r"].sequences
    engine.scheduler.retire(first, "stop")
    assert [one.sample_index for one in (first, *others)] == [0, 1, 2]
    engine.abort("r")
    assert [one.finish_reason for one in engine.output("r").outputs] == ["stop", "abort", "abort"]
    ends = {one.seq_id: one.finish and one.finish.reason for one in engine.timeline.requests()}
    assert ends == {0: None, 1: "abort", 2: "abort"}
    engine.forget("r")
    with pytest.raises(KeyError):
        engine.output("r")


@pytest.mark.parametrize("before", [[], ["first"]])
def test_an_arrival_is_recorded_once_and_its_ids_are_issued_once(before):
    def add(engine) -> None:
        engine.add_request("late", letters("ab"), ON, priority=3)

    for line in range(lines_of(partial(add, new_engine(muddled)))):
        engine = new_engine(muddled)
        for name in before:
            engine.add_request(name, letters("ab"), ON)
        interrupted_at(line, partial(add, engine))
        known = [*before, "late"] if "late" in engine._requests else before
        engine.add_request("last", letters("ab"), ON)
        record = engine.step()
        arrived = [(arrival.request_id, arrival.priority) for arrival in record.arrived]
        assert arrived == [(name, 3 * (name == "late")) for name in (*known, "last")]
        assert [timeline.seq_id for timeline in engine.timeline.requests()] == list(range(len(known) + 1))
        assert record.queues.finished == 0


def test_a_task_that_is_a_generation_is_the_generation():
    engine = new_engine(muddled)
    engine.add_request("r", letters("ab"), ON, task=Task(sample=True))
    (sequence,) = engine._requests["r"].sequences
    assert sequence.task is GENERATE and sequence.matcher is None, "nothing restricts its tokens"
    run_all(engine)
    assert engine.output("r").outputs[0].readout is None
