"""Requests that keep nothing: who is one, what it holds, and that it says what a generation would say."""

import numpy as np
import pytest

from forge.engine import readout
from forge.engine.engine import Engine
from forge.engine.sampling_params import SamplingParams
from forge.engine.task import Task
from forge.errors import UsageError
from forge.reasons import NoBudget
from forge.trace.records import StepRecord, WaitRecord
from tests.engine.scripted import ScriptedModel, assert_nothing_held, letters, muddled, new_engine, run_all
from tests.engine.test_interruption import interrupted_at, lines_of

KINDS = ("off", "basic", "paged", "prefix")
KV = pytest.mark.parametrize("kv", KINDS)
ONE = SamplingParams(max_tokens=1, logprobs=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=99, ignore_eos=True)


def engine_of(kv: str = "prefix", **options) -> Engine:
    return new_engine(muddled, **({"kv": kv, "max_model_len": 64} | options))


def ask(engine: Engine, *texts: str, params: SamplingParams = ONE) -> list[str]:
    """Queue one request per text, named by its place."""
    names = [f"r{place}" for place in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        engine.add_request(name, letters(text), params)
    return names


def answers(engine: Engine, names: list[str]) -> list[tuple]:
    """All that a caller sees of each request."""
    found = []
    for name in names:
        output = engine.output(name)
        one = output.outputs[0]
        found.append(
            (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, output.prompt_logprobs)
        )
    return found


def alone(text: str, params: SamplingParams = ONE, **options) -> tuple:
    engine = engine_of(**options)
    names = ask(engine, text, params=params)
    run_all(engine)
    return answers(engine, names)[0]


# Who is one


@pytest.mark.parametrize(
    ("prompt", "options", "config", "expected"),
    [
        pytest.param("ab", {"max_tokens": 1}, {}, True, id="one token"),
        pytest.param("ab", {"max_tokens": 2}, {}, False, id="two tokens"),
        pytest.param("ab", {"max_tokens": 1, "temperature": 1.0, "seed": 3}, {}, True, id="one that is drawn"),
        pytest.param("ab", {"max_tokens": 1, "stop": ("x",)}, {}, True, id="one, with a stop string"),
        pytest.param("ab", {"max_tokens": 1, "logprobs": 2, "prompt_logprobs": 1}, {}, True, id="log probabilities"),
        pytest.param("ab", {"max_tokens": 0, "prompt_logprobs": 1}, {}, True, id="those of the prompt alone"),
        pytest.param("ab", {"max_tokens": 1, "n": 2}, {}, False, id="two samples"),
        pytest.param("a" * 64, {"max_tokens": 9}, {}, True, id="the context has room for one"),
        pytest.param("a" * 63, {"max_tokens": 9}, {}, False, id="the context has room for two"),
        pytest.param("a" * 16, {"max_tokens": 9}, {"num_blocks": 4}, True, id="the pool has room for one"),
        pytest.param("a" * 15, {"max_tokens": 9}, {"num_blocks": 4}, False, id="the pool has room for two"),
        pytest.param("ab", {"max_tokens": 1}, {"prefill_only": False}, False, id="nobody is to be one"),
    ],
)
def test_who_keeps_nothing(prompt, options, config, expected):
    engine = engine_of("paged", **config)
    engine.add_request("r", letters(prompt), SamplingParams(ignore_eos=True, **options))

    record = engine.step()

    assert record.execution_class == ("prefill_only" if expected else "mixed")
    assert [item.phase for item in record.items] == ["prefill_only" if expected else "prefill"]


def test_one_whose_cache_is_to_be_continued_is_a_generation():
    engine = engine_of("paged")
    engine.add_request("r", letters("ab"), SamplingParams(max_tokens=1), retain_cache=True)
    assert engine.step().execution_class == "mixed"


def test_a_task_is_always_one():
    engine = engine_of("paged", prefill_only=False)
    engine.add_request("r", letters("ab"), SamplingParams(), task=Task(candidates=(1, 2)))
    assert engine.step().execution_class == "prefill_only"
    assert len(engine.output("r").outputs[0].readout.candidates) == 2


@pytest.mark.parametrize(
    ("prompt", "task", "message"),
    [
        pytest.param([], Task(sample=True), "the prompt is empty", id="empty"),
        pytest.param([1] * 65, Task(sample=True), "65 tokens and the context holds 64", id="too long"),
        pytest.param([999], Task(sample=True), "token id 999", id="no such token"),
        pytest.param([1], Task(candidates=(1, 99)), "token id 99", id="no such candidate"),
        pytest.param([1], Task(sample=True), "logit_bias: token id 28", id="no such token in its bias"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_nothing_changes(prompt, task, message):
    engine = engine_of()
    params = SamplingParams(logit_bias={28: 1.0} if "bias" in message else None)
    with pytest.raises(UsageError, match=message):
        engine.add_request("r", prompt, params, task=task)
    assert not engine.has_unfinished()
    engine.add_request("r", [1], SamplingParams(), task=Task(sample=True))
    assert [one.request_id for one in engine.step().rejected] == ["r"]


def test_an_answer_ends_as_stop_unless_its_prompt_is_all_that_was_asked_for():
    engine = engine_of()
    engine.add_request("label", letters("ab"), SamplingParams(max_tokens=1), task=Task(candidates=(1,)))
    engine.add_request("prompt", letters("ab"), SamplingParams(max_tokens=0, prompt_logprobs=0))
    run_all(engine)
    assert [engine.output(name).outputs[0].finish_reason for name in ("label", "prompt")] == ["stop", "length"]


def test_a_step_with_a_generation_beside_it_is_mixed():
    engine = engine_of("paged")
    engine.add_request("g", letters("ab"), LONG)
    engine.step()
    assert engine.step().execution_class == "decode"
    ask(engine, "cd")
    assert engine.step().execution_class == "mixed"
    assert engine.step().execution_class == "decode"


# What it holds


@pytest.mark.parametrize("kv", ["off", "basic", "paged"])
def test_without_shared_prefixes_the_blocks_do_not_move(kv):
    engine = engine_of(kv)
    engine.add_request("g", letters("hello"), LONG)
    engine.step()
    before = engine.cache.stats()

    ask(engine, "abcdefgh", "abcdefghijk", "xyz")
    plan = engine.scheduler.schedule()

    prefill_only = [item for item in plan.items if item.phase == "prefill_only"]
    assert len(prefill_only) == 3
    after = engine.cache.stats()
    assert after == before
    own = engine.scheduler.running[0]
    assert not any(one.seq_id in engine.cache for one in prefill_only)
    assert own.seq_id in engine.cache


def test_what_moves_is_the_prefix_that_others_want_too():
    engine = engine_of()
    ask(engine, "abcdefgh" + "ij", "abcdefgh" + "kl", "mnopqrstuv")
    plan = engine.scheduler.schedule()

    assert [one.num_published for one in plan.items] == [8, 0], "the leader, and the one that shares nothing"
    held = engine.cache.stats()
    assert (held.used_blocks, held.cached_blocks) == (2, 0)
    pool = engine.cache.pool.num_blocks
    tables = [one.block_table for one in plan.items]
    assert [sum(block < pool for block in table) for table in tables] == [2, 0]
    assert len({block for table in tables for block in table}) == sum(map(len, tables)), "nobody shares scratch"


def test_afterwards_only_published_prefixes_stay():
    engine = engine_of()
    names = ask(engine, "abcdefghij", "abcdefghkl", "mnopqrstuv")
    run_all(engine)
    stats = engine.cache.stats()
    assert (stats.used_blocks, stats.cached_blocks) == (0, 2)
    for name in names:
        engine.forget(name)
    assert_nothing_held(engine)


def test_a_prefix_that_comes_a_second_time_is_kept():
    engine = engine_of()
    for place, text in enumerate(("abcdefghij", "abcdefghkl", "abcdefghmn")):
        engine.add_request(f"r{place}", letters(text), ONE)
        run_all(engine)
    cached = [engine.output(f"r{place}").metrics.tokens_cached for place in range(3)]
    assert cached == [0, 0, 8]
    assert engine.cache.stats().cached_blocks == 2


def test_the_records_account_for_it():
    engine = engine_of("paged")
    engine.add_request("g", letters("hello"), LONG)
    engine.step()
    ask(engine, "abcdefgh", "xyz")

    record = engine.step()

    assert record.tokens_computed == 12
    assert record.block_table_entries == 2, "those of the generation"
    assert record.temporary_bytes == 12 + 3, "as the model says, of all rows and of those with logits"
    assert record.cache.used_blocks == 2


@KV
def test_a_prompt_pays_for_one_row_of_logits(kv):
    engine = engine_of(kv)
    ask(engine, "abcdefghijklmnop")
    (one,) = engine.scheduler.schedule().items
    assert one.logit_rows == range(15, 16)


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        (Task(sample=True), range(9, 10)),
        (Task(candidates=(1,)), range(9, 10)),
        (Task(score_from=1), range(0, 9)),
        (Task(score_from=1, sample=True), range(0, 10)),
        (Task(score_from=7), range(6, 9)),
        (Task(score_from=9), range(8, 9)),
        (Task(pooling="last"), range(9, 10)),
        (Task(pooling="mean"), range(0, 10)),
        (Task(), range(9, 9)),
    ],
)
def test_the_rows_that_a_task_needs_of_ten_tokens(task, rows):
    assert list(task.logit_rows(0, 10)) == list(rows)


# Budgets


def test_a_step_takes_as_many_as_its_tokens_allow():
    engine = engine_of("paged", prefill_only_tokens=10)
    names = ask(engine, "abcd", "efgh", "ij", "kl", "mnopqrstuvwxyz", "a")
    records = run_all(engine)
    assert [[item.num_tokens for item in record.items] for record in records] == [[4, 4, 2], [2], [14], [1]]
    assert [type(one.reason).__name__ for one in records[0].waiting] == ["NoBudget"]
    assert answers(engine, names) == [alone(text) for text in ("abcd", "efgh", "ij", "kl", "mnopqrstuvwxyz", "a")]


def test_a_step_takes_as_many_as_its_memory_allows():
    engine = engine_of("paged", prefill_only_memory=15)  # a row takes one byte, and one more with logits
    ask(engine, "abcd", "efgh", "ijkl", "mnopq", "rstuv", "wxyza")
    assert [len(record.items) for record in run_all(engine)] == [3, 2, 1]


def test_beside_generations_they_take_what_is_left_of_the_step():
    engine = engine_of("paged", max_num_batched_tokens=12)
    engine.add_request("g", letters("hello"), LONG)
    engine.step()
    ask(engine, "abcdef", "ghijk", "lmnop")
    phases = [[item.phase for item in engine.step().items] for _ in range(2)]
    assert phases == [["decode", "prefill_only", "prefill_only"], ["decode", "prefill_only"]]


class EmbeddingModel(ScriptedModel):
    """Its hidden states are its logits."""

    embeds = True

    def hidden(self, batch, storage) -> np.ndarray:
        return self.forward(batch, storage)


LENGTHY = "a long prompt of which every token counts"
"""41 tokens."""
ASKED = {
    "two tokens": {"params": SamplingParams(max_tokens=2, ignore_eos=True)},
    "one token": {"params": ONE},
    "one token, and the prompt's": {"params": SamplingParams(max_tokens=1, prompt_logprobs=2, ignore_eos=True)},
    "prompt log probabilities": {"params": SamplingParams(max_tokens=0, prompt_logprobs=1)},
    "scores": {"task": Task(score_from=1, top=2)},
    "scores of its end": {"task": Task(score_from=30)},
    "candidates": {"task": Task(candidates=(3, 1))},
    "scores and a token": {"task": Task(sample=True, score_from=9)},
    "mean embedding": {"task": Task(pooling="mean")},
    "last embedding": {"task": Task(pooling="last")},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("kv", ["basic", "paged", "prefix"])
def test_whatever_is_asked_of_long_prompts_a_stream_beside_them_has_one_budget_of_rows(kv, asked):
    def run(streams: int, number: int) -> tuple[list[StepRecord], list]:
        engine = engine_of(kv, num_blocks=None if kv == "basic" else 64, max_num_batched_tokens=16, max_num_seqs=3)
        engine.model = EmbeddingModel(muddled, 28)
        generations(engine, streams)
        records = [engine.step() for _ in range(streams)]
        for place in range(number):
            text = f"{'abcdefgh'[place]} {LENGTHY}"
            engine.add_request(f"r{place}", letters(text), **{"params": SamplingParams()} | asked)
        while any(engine.is_unfinished(f"r{place}") for place in range(number)):
            records.append(engine.step())
            engine.scheduler.check_invariants()
        outputs = [engine.output(f"r{place}") for place in range(number)]
        readouts = [output.outputs[0].readout for output in outputs]
        vectors = [one.embedding.tobytes() for one in readouts if one is not None and one.embedding is not None]
        seen = [answers(engine, [f"r{place}" for place in range(number)]), vectors]
        if not vectors:
            seen.append(readouts)
        return records, seen

    records, found = run(streams=1, number=5)

    assert max(sum(item.num_tokens for item in record.items) for record in records) == 16
    assert all(0 in {token.seq_id for token in record.tokens} for record in records), (
        "a step without the stream's token"
    )
    assert len(records) <= 5 * 43 // 15 + 3, "the budget is used"
    assert found == run(streams=0, number=5)[1]


@pytest.mark.parametrize("preempt", ["lifo", "lifo-others", "least-progressed"])
def test_an_embedding_in_chunks_that_is_preempted_in_its_step_writes_nothing_in_it(preempt):
    def engine(num_blocks: int) -> Engine:
        engine = engine_of("paged", num_blocks=num_blocks, block_size=1, max_num_batched_tokens=8, preempt=preempt)
        engine.model = EmbeddingModel(muddled, 28)
        return engine

    num_preempted = 0
    for length, spare in ((length, spare) for length in (8, 14, 15) for spare in range(2, 9)):
        prompt, crowded, quiet = letters(LENGTHY[:length]), engine(length + spare), engine(64)
        crowded.add_request("first", letters("a"), SamplingParams(max_tokens=9, ignore_eos=True))
        crowded.step()
        for each in (crowded, quiet):
            each.add_request("e", prompt, SamplingParams(), task=Task(pooling="last"))
        crowded.step()
        crowded.add_request("last", letters("b"), SamplingParams(max_tokens=9, ignore_eos=True))
        num_preempted += sum(len(record.preempted) for record in run_all(crowded))
        run_all(quiet)
        vectors = [each.output("e").outputs[0].readout.embedding.tobytes() for each in (crowded, quiet)]
        assert vectors[0] == vectors[1]
    assert num_preempted


def test_prefill_only_requests_beside_an_embedding_in_chunks_share_its_budget_of_rows():
    engine = engine_of("paged", num_blocks=64, max_num_batched_tokens=8, prefill_only_tokens=64)
    engine.model = EmbeddingModel(muddled, 28)
    generations(engine, 1)
    engine.step()
    engine.add_request("e", letters(LENGTHY), SamplingParams(), task=Task(pooling="last"))
    ask(engine, *["the first of six"] * 6)
    engine.step()
    engine.abort("g0")
    for record in run_all(engine):
        if any(item.phase == "prefill" for item in record.items):
            assert sum(item.num_tokens for item in record.items) <= 8


def test_short_requests_of_several_samples_starve_no_long_one():
    engine = engine_of("paged", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16)
    several = SamplingParams(max_tokens=6, ignore_eos=True, n=4)
    engine.add_request("s", letters("xyz"), several)
    engine.step()
    engine.add_request("long", letters(LENGTHY), LONG)
    admitted: set[int] = set()
    for place in range(20):
        engine.add_request(f"s{place}", letters("xyz"), several)
        admitted |= {record.seq_id for record in engine.step().admitted}
    assert 4 in admitted


@pytest.mark.parametrize(("streams", "tokens"), [(0, 32), (1, 32), (0, 3)])
def test_short_prefill_only_requests_pass_long_ones_without_starving_them(streams, tokens):
    engine = engine_of("paged", num_blocks=64, max_num_batched_tokens=16, prefill_only_tokens=tokens)
    generations(engine, streams)
    engine.has_unfinished() and engine.step()
    for name in ("a", "b", "c"):
        engine.add_request(name, letters(f"{name} {LENGTHY}"), ONE)
    for place in range(40):
        engine.add_request(f"s{place}", letters("xyz"), ONE)
        engine.step()
        assert tokens == 3 or not engine.is_unfinished(f"s{place}")
        if not engine.is_unfinished("c"):
            break
    assert place <= 3 * 43 // 11 + 2, "long ones keep most of each step"
    run_all(engine)
    assert answers(engine, ["a", "c", "s0"]) == [alone(f"a {LENGTHY}"), alone(f"c {LENGTHY}"), alone("xyz")]


def test_a_generation_admitted_behind_prefill_only_requests_keeps_the_steps_budget():
    engine = engine_of("paged", max_num_batched_tokens=12)
    ask(engine, "abcd")
    engine.add_request("g", letters("hello"), LONG)
    for text in ("efgh", "ijkl", "mnop"):
        engine.add_request(text, letters(text), ONE)
    records = [engine.step() for _ in range(3)]
    assert [sum(item.num_tokens for item in record.items) for record in records] == [9, 9, 5]
    assert answers(engine, ["efgh", "ijkl", "mnop"]) == [alone(text) for text in ("efgh", "ijkl", "mnop")]


@pytest.mark.parametrize(
    ("texts", "options", "reason"),
    [
        (("abcd", "efgh"), {"prefill_only_tokens": 7}, NoBudget(7, "prefill_only_tokens")),
        (("abcd", "efgh"), {"prefill_only_memory": 9}, NoBudget(9, "prefill_only_memory")),
    ],
)
def test_a_request_that_waits_names_the_limit_that_it_waits_for(texts, options, reason):
    engine = engine_of("paged", **options)
    ask(engine, *texts)
    assert engine.step().waiting == (WaitRecord(1, reason),)


def test_beside_a_stream_the_limit_is_the_steps():
    engine = engine_of("paged", max_num_batched_tokens=6)
    engine.add_request("g", letters("ab"), LONG)
    engine.step()
    ask(engine, "abcd", "efgh")
    assert engine.step().waiting == (WaitRecord(2, NoBudget(6)),)


# Capacity


def generations(engine: Engine, number: int) -> None:
    for place in range(number):
        engine.add_request(f"g{place}", letters("abcdefgh"), LONG)


@KV
def test_judges_do_not_cut_what_generations_may_have(kv):
    def run(judged: bool) -> tuple[list, list]:
        engine = engine_of(kv, num_blocks=None if kv == "off" else 32, max_num_seqs=2)
        generations(engine, 3)
        records, step = [], 0
        while any(engine.is_unfinished(f"g{place}") for place in range(3)):
            if judged and step % 3 == 0:
                engine.add_request(f"judge {step}", letters("xyzxyzxyz"), ONE)
            records.append(engine.step())
            engine.scheduler.check_invariants()
            step += 1
        own = [
            [(item.seq_id, item.phase, item.start) for item in record.items if item.phase != "prefill_only"]
            for record in records
        ]
        order = sorted({seq_id for step in own for seq_id, *_ in step})
        own = [[(order.index(seq_id), *rest) for seq_id, *rest in step] for step in own]
        return own, [engine.output(f"g{place}").outputs[0].token_ids for place in range(3)]

    assert run(judged=True) == run(judged=False)


def test_with_the_pool_full_a_judge_is_answered_in_the_next_step():
    engine = engine_of("paged", num_blocks=8, max_num_seqs=4)
    generations(engine, 3)
    for _ in range(6):
        engine.step()
    assert engine.cache.num_available == 0
    ask(engine, "xyzxyzxyzxyz")

    record = engine.step()

    assert [one.reason for one in record.finished] == ["length"]
    assert not record.preempted
    assert answers(engine, ["r0"]) == [alone("xyzxyzxyzxyz")]


# What it says


TEXTS = ("hello world", "hello there", "a", "hello world again", "abcdefghijklmnopqrstuvwxyz", "hello w")
WAYS = {
    "greedy": ONE,
    "drawn": SamplingParams(max_tokens=1, temperature=1.3, top_p=0.9, seed=5, logprobs=2),
    "penalized": SamplingParams(max_tokens=1, repetition_penalty=1.4, ignore_eos=True, logprobs=2),
    "prompt": SamplingParams(max_tokens=1, prompt_logprobs=2, ignore_eos=True),
    "prompt alone": SamplingParams(max_tokens=0, prompt_logprobs=2),
    "stop": SamplingParams(max_tokens=1, stop=tuple("abcdefghijklm"), ignore_eos=True),
    "end": SamplingParams(max_tokens=1, temperature=3.0, seed=9),
}


@KV
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_it_says_what_a_generation_says_and_what_it_says_alone(kv, way):
    def together(prefill_only: bool) -> list[tuple]:
        engine = engine_of(kv, num_blocks=None if kv in ("off", "basic") else 40, prefill_only=prefill_only)
        engine.add_request("beside", letters("hello wo"), SamplingParams(max_tokens=12, ignore_eos=True))
        engine.step()
        names = ask(engine, *TEXTS, params=way)
        run_all(engine)
        return answers(engine, names)

    expected = [alone(text, way, kv="off", prefill_only=False) for text in TEXTS]
    assert together(prefill_only=True) == expected
    assert together(prefill_only=False) == expected


@KV
@pytest.mark.parametrize("budget", [1, 7, 20, 512])
def test_scores_and_candidates_are_those_of_one_request_alone(kv, budget):
    asked = [
        Task(candidates=(3, 1, 2)),
        Task(score_from=1, top=2),
        Task(score_from=4, candidates=(5, 6)),
        Task(sample=True, score_from=6, top=1),
    ]

    def results(engine: Engine, requests) -> list:
        for place, (text, task) in enumerate(requests):
            engine.add_request(f"r{place}", letters(text), ONE, task=task)
        run_all(engine)
        return [engine.output(f"r{place}").outputs[0].readout for place in range(len(requests))]

    requests = [(text, task) for text in ("hello world", "hello there", "hello world") for task in asked]
    expected = [results(engine_of("off"), [one])[0] for one in requests]
    assert results(engine_of(kv, prefill_only_tokens=budget), requests) == expected


def test_scores_are_the_log_probabilities_of_the_prompt():
    engine = engine_of()
    engine.add_request("s", letters("hello world"), SamplingParams(), task=Task(score_from=3, top=2))
    engine.add_request("r", letters("hello world"), SamplingParams(max_tokens=0, prompt_logprobs=2))
    run_all(engine)
    assert engine.output("s").outputs[0].readout.scores == engine.output("r").prompt_logprobs[3:]


def test_what_needs_every_token_takes_no_hit_over_them():
    engine = engine_of()
    for place in range(3):  # the third time it would be cached
        engine.add_request(f"warm {place}", letters("abcdefghijkl"), SamplingParams(max_tokens=1))
        run_all(engine)
    tasks = {
        "last": (Task(sample=True), 8),
        "scored from the first": (Task(score_from=1), 0),
        "from the sixth": (Task(score_from=6), 4),
        "from the tenth": (Task(score_from=10), 8),
    }
    for name, (task, cached) in tasks.items():
        engine.add_request(name, letters("abcdefghijkl"), SamplingParams(max_tokens=1), task=task)
        run_all(engine)
        assert engine.output(name).metrics.tokens_cached == cached, name


def test_salted_requests_share_nothing():
    engine = engine_of()
    for place, salt in enumerate(("x", "y", "x", "x")):
        engine.add_request(f"r{place}", letters("abcdefghij"), ONE, salt=salt)
        run_all(engine)
    assert [engine.output(f"r{place}").metrics.tokens_cached for place in range(4)] == [0, 0, 0, 8]


# Interruptions


MIXTURE = {
    "g": ("hello", SamplingParams(max_tokens=6, ignore_eos=True)),
    "a": ("abcdefghij", ONE),
    "b": ("abcdefghkl", SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True)),
    "c": ("abcdefghmn", ONE),
    "d": ("xyz", SamplingParams(max_tokens=0, prompt_logprobs=1)),
}


def busy(kv: str, steps: int = 1) -> Engine:
    engine = engine_of(kv, prefill_only_tokens=16)
    for name, (text, params) in MIXTURE.items():
        engine.add_request(name, letters(text), params)
    for _ in range(steps):
        engine.step()
    return engine


@KV
@pytest.mark.parametrize("steps", [0, 1])
def test_an_interrupted_step_can_be_gone_on_from_as_if_nothing_had_happened(kv, steps):
    expected_engine = busy(kv, 0)
    run_all(expected_engine)
    expected = answers(expected_engine, list(MIXTURE))
    lines = lines_of(busy(kv, steps).step)
    for line in range(0, lines, 13):
        engine = busy(kv, steps)
        assert interrupted_at(line, engine.step)
        engine.output("g")  # recovers
        assert engine.has_unfinished()
        engine.scheduler.check_invariants()
        run_all(engine)
        assert answers(engine, list(MIXTURE)) == expected, f"line {line}"
        for name in MIXTURE:
            engine.forget(name)
        assert_nothing_held(engine)


@KV
def test_an_interrupted_step_can_be_aborted(kv):
    lines = lines_of(busy(kv).step)
    for line in range(0, lines, 29):
        engine = busy(kv)
        assert interrupted_at(line, engine.step)
        for name in MIXTURE:
            engine.abort(name)
        for name in MIXTURE:
            assert engine.output(name).outputs[0].finish_reason is not None
            engine.forget(name)
        assert_nothing_held(engine)
        again = ask(engine, "abcdefghij")
        run_all(engine)
        assert answers(engine, again) == [alone("abcdefghij")]


def test_a_request_that_is_aborted_has_no_answer_and_ends_once():
    engine = engine_of("paged", prefill_only_tokens=4)
    names = ask(engine, "abcd", "efgh", "ijkl")
    engine.step()
    engine.abort("r1")
    engine.abort("r1")
    records = run_all(engine)
    assert [engine.output(name).outputs[0].finish_reason for name in names] == ["length", "abort", "length"]
    assert engine.output("r1").outputs[0].token_ids == ()
    assert engine.output("r1").outputs[0].readout is None
    assert sum(len(record.finished) for record in records) == 1
    assert engine.scheduler.num_finished == 3


def broken_after(text: str):
    return lambda tokens: np.full(28, np.nan, np.float32) if tokens == letters(text) else muddled(tokens)


@pytest.mark.parametrize("params", [ONE, SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, prompt_logprobs=1)])
@pytest.mark.parametrize("slice_rows", [1000, 2])
def test_logits_that_are_no_numbers_end_the_request_that_they_are_of_and_nobody_else(params, slice_rows, monkeypatch):
    monkeypatch.setattr(readout, "max_logit_rows", lambda vocab_size: slice_rows)
    engine = new_engine(broken_after("bad"), kv="prefix", max_model_len=64)
    engine.scheduler._max_logit_rows = slice_rows
    for name in ("abc", "bad", "cab"):
        engine.add_request(name, letters(name), params)
    engine.add_request("generation", letters("hello"), LONG)
    records = run_all(engine)

    assert answers(engine, ["abc", "cab"]) == [alone("abc", params), alone("cab", params)]
    bad = engine.output("bad").outputs[0]
    assert (bad.finish_reason, bad.token_ids) == ("error", ()) and "not finite" in bad.errors[0]
    (finish,) = [one for record in records for one in record.finished if one.reason == "error"]
    assert "not finite" in finish.error
    assert (
        engine.output("bad").outputs[0].readout is None
        and engine.output("generation").outputs[0].finish_reason == "length"
    )
    for name in ("abc", "bad", "cab", "generation"):
        engine.forget(name)
    assert_nothing_held(engine)


def test_what_a_broken_forward_wrote_for_a_request_that_keeps_nothing_is_not_published():
    engine = new_engine(broken_after("abcdefghij"), kv="prefix", max_model_len=64)
    ask(engine, "abcdefghij", "abcdefghkl")
    engine.step()
    assert engine.output("r0").outputs[0].finish_reason == "error"
    assert engine.cache.stats().cached_blocks == 0
    run_all(engine)
    assert answers(engine, ["r1"]) == [alone("abcdefghkl")]


# A step that fails


class Broken(Exception):
    pass


def failing(engine: Engine) -> None:
    """The next forward fails."""
    forward = engine.model.forward

    def fail(batch, storage):
        engine.model.forward = forward
        raise Broken

    engine.model.forward = fail


def test_a_step_that_fails_fails_only_the_requests_that_were_in_it():
    engine = engine_of("paged", max_num_seqs=1, prefill_only_tokens=4)
    engine.add_request("in it", letters("ab"), LONG)
    engine.add_request("waits for a place", letters("cd"), SamplingParams(max_tokens=3, ignore_eos=True))
    names = ask(engine, "abcd", "efgh")
    failing(engine)
    with pytest.raises(Broken):
        engine.step()

    assert engine.fail_step() == ("in it", "r0")
    assert [engine.output(name).outputs[0].finish_reason for name in ("in it", "r0")] == ["error", "error"]
    run_all(engine)
    assert answers(engine, names[1:]) == [alone("efgh")]
    assert engine.output("waits for a place").outputs[0].finish_reason == "length"
    for name in ("in it", "waits for a place", *names):
        engine.forget(name)
    assert_nothing_held(engine)


def test_a_step_that_fails_before_it_is_decided_fails_everybody():
    engine = engine_of("paged", max_num_seqs=1)
    engine.add_request("g", letters("ab"), LONG)
    engine.add_request("waits", letters("cd"), LONG)
    ask(engine, "abcd")
    engine.step()

    def fail():
        raise Broken

    ask_again = engine.add_request("r1", letters("efgh"), ONE)
    engine.scheduler.schedule = fail
    with pytest.raises(Broken):
        engine.step()
    assert ask_again and engine.fail_step() == ("g", "waits", "r1")
    assert not engine.has_unfinished()


def test_what_had_been_chosen_when_a_step_failed_stands_and_its_request_is_named():
    engine = engine_of("paged")
    engine.add_request("ends", letters("ab"), SamplingParams(max_tokens=2, ignore_eos=True))
    engine.add_request("goes on", letters("ab"), LONG)
    engine.step()

    def fail(*arguments):
        raise Broken

    engine.scheduler.commit = fail
    with pytest.raises(Broken):
        engine.step()
    assert engine.fail_step() == ("ends", "goes on")
    assert engine.output("ends").outputs[0].finish_reason == "length"
    assert len(engine.output("goes on").outputs[0].token_ids) == 2
    assert engine.output("goes on").outputs[0].finish_reason == "error"
