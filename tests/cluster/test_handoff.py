"""A hand-over: another engine's keys and values, continued to the last bit."""

from dataclasses import replace

import numpy as np
import pytest

from forge import LLM, SamplingParams
from forge.cache.block_pool import blocks_for
from forge.engine.handoff import KvHandoff, add_handed_over, hand_off
from forge.engine.task import Task
from forge.errors import UsageError
from forge.trace.records import AdmitRecord, Queues

PROMPT = list(b"Once upon a time there was a fox who lived by the old mill")
PARAMS = SamplingParams(max_tokens=24, temperature=0.9, seed=3, ignore_eos=True)


def engine_of(model: str, **options):
    return LLM(model, threads=1, check=True, **{"kv": "prefix", **options}).engine


def prefilled(model: str, prompt: list[int], **options) -> KvHandoff:
    """What a prefill engine hands over of a prompt."""
    engine = engine_of(model, **options)
    (seq_id,) = engine.add_request("p", prompt[:-1], SamplingParams(max_tokens=1), retain_cache=True)
    while engine.has_unfinished():
        engine.step()
    handoff = hand_off(engine, seq_id)
    engine.release(seq_id)
    assert engine.cache.stats().used_blocks == 0
    return handoff


def run(engine, prompt: list[int], handoff: KvHandoff | None = None, params: SamplingParams = PARAMS):
    """The tokens, their logits, the rows computed and the admissions."""
    logits, rows, admitted = [], 0, []
    engine.on_logits.append(lambda seq_id, row: logits.append(row.tobytes()))
    if handoff is None:
        engine.add_request("r", prompt, params)
    else:
        add_handed_over(engine, handoff, "r", prompt, params)
    while engine.has_unfinished():
        record = engine.step()
        rows += sum(item.num_tokens for item in record.items)
        admitted += record.admitted
    tokens = [sample.token_ids for sample in engine.output("r").outputs]
    engine.forget("r")
    return tokens, logits, rows, admitted


@pytest.mark.parametrize(("model", "kv_dtype"), [("hash", None), ("tales", None), ("tales", "int8")])
@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_the_tokens_and_logits_are_those_of_one_engine(model: str, kv_dtype: str | None, kv: str):
    handoff = prefilled(model, PROMPT, kv_dtype=kv_dtype)
    alone = run(engine_of(model, kv_dtype=kv_dtype), PROMPT)
    engine = engine_of(model, kv=kv, kv_dtype=kv_dtype)
    tokens, logits, rows, admitted = run(engine, PROMPT, handoff)
    assert (tokens, logits) == alone[:2]
    assert rows == alone[2] - (len(PROMPT) - 1)
    assert admitted == [AdmitRecord(admitted[0].seq_id, "handoff", len(PROMPT) - 1, admitted[0].num_blocks)]
    assert engine.cache.stats().used_blocks == 0 and not engine.scheduler.host_pool.entries


def test_several_samples_share_what_was_handed_over():
    params = replace(PARAMS, n=3)
    assert (
        run(engine_of("hash"), PROMPT, prefilled("hash", PROMPT), params)[0]
        == run(engine_of("hash"), PROMPT, None, params)[0]
    )


def test_without_room_in_the_host_pool_the_prompt_is_computed():
    tokens, logits, _, admitted = run(engine_of("hash", num_host_blocks=1), PROMPT, prefilled("hash", PROMPT))
    assert (tokens, logits) == run(engine_of("hash"), PROMPT)[:2]
    assert admitted[0].how == "new"


def test_a_hand_over_of_another_prompt_or_layout_is_refused_and_changes_nothing():
    engine, handoff = engine_of("hash"), prefilled("hash", PROMPT)
    with pytest.raises(UsageError, match="other tokens than the prompt begins with"):
        add_handed_over(engine, handoff, "r", list(b"Twice upon a time"), PARAMS)
    other = replace(handoff, layout=replace(handoff.layout, num_layers=9))
    with pytest.raises(UsageError, match="give both engines one model"):
        add_handed_over(engine, other, "r", PROMPT, PARAMS)
    with pytest.raises(UsageError, match="other tokens"):
        add_handed_over(engine, handoff, "r", PROMPT, PARAMS, salt="another")
    assert not engine.has_unfinished()


@pytest.mark.parametrize("kv", ["basic", "paged", "prefix"])
def test_a_request_for_one_token_computes_nothing_but_the_last_row(kv: str):
    params = replace(PARAMS, max_tokens=1)
    engine = engine_of("hash", kv=kv)
    tokens, logits, rows, admitted = run(engine, PROMPT, prefilled("hash", PROMPT), params)
    assert (tokens, logits) == run(engine_of("hash", kv=kv), PROMPT, None, params)[:2]
    assert (rows, [one.how for one in admitted]) == (1, ["handoff"])
    assert engine.scheduler.queues == Queues(waiting=0, running=0, swapped=0, finished=1)


@pytest.mark.parametrize("task", [Task(score_from=3), Task(candidates=(5, 6)), Task(sample=True, score_from=1)])
def test_a_task_takes_no_room_in_the_host_pool(task: Task):
    engine = engine_of("hash")
    add_handed_over(engine, prefilled("hash", PROMPT), "r", PROMPT, PARAMS, task=task)
    assert not engine.scheduler.host_pool.entries
    record = engine.step()
    assert record.queues == Queues(waiting=0, running=0, swapped=0, finished=1)


def test_an_engine_without_a_cache_refuses_a_hand_over():
    engine = engine_of("hash", kv="off")
    with pytest.raises(UsageError, match="give this engine --kv basic, paged or prefix"):
        add_handed_over(engine, prefilled("hash", PROMPT), "r", PROMPT, PARAMS)
    assert not engine.has_unfinished()


def test_an_engine_without_a_cache_hands_nothing_over_and_the_prompt_is_computed():
    tokens, logits, _, admitted = run(engine_of("hash"), PROMPT, prefilled("hash", PROMPT, kv="off"))
    assert (tokens, logits) == run(engine_of("hash"), PROMPT)[:2]
    assert admitted[0].how == "new"


def test_a_sequence_that_is_aborted_before_it_begins_frees_its_room():
    engine = engine_of("hash")
    add_handed_over(engine, prefilled("hash", PROMPT), "r", PROMPT, PARAMS)
    assert engine.scheduler.host_pool.entries
    engine.abort("r")
    assert not engine.scheduler.host_pool.entries


def test_the_bytes_are_those_of_its_blocks():
    handoff = prefilled("tales", PROMPT)
    layout = handoff.layout
    num_slots = blocks_for(len(PROMPT) - 1, layout.block_size) * layout.block_size
    assert handoff.position == len(PROMPT) - 1 and handoff.num_bytes == num_slots * layout.bytes_per_token
    assert all(isinstance(part, np.ndarray) for part in handoff.data)
