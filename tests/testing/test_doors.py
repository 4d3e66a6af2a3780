"""What is handed to `LLM` as it is: a cache, an order, a policy, a proposer, a model, a piece of the engine."""

from collections.abc import Iterator

import pytest

from forge import LLM, SamplingParams, UsageError
from forge.cache.factory import create_kv_cache
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.cache.prefix_index import Node
from forge.cli.run_control import trace_header
from forge.engine.policies import SchedulerConfig, lifo
from forge.engine.proposer import Proposal, Proposer
from forge.engine.scheduler import Scheduler
from forge.model.hash_model import HashModel
from forge.model.loader import LoadedModel, load_model
from forge.pieces import Pieces, standing_in
from forge.tokenizer.byte_tokenizer import ByteTokenizer

UNENDING = {"temperature": 0.0, "ignore_eos": True}


def said(llm: LLM, prompts=("Once", "upon a time"), max_tokens: int = 12) -> list[tuple[int, ...]]:
    outputs = llm.generate(list(prompts), SamplingParams(max_tokens=max_tokens, **UNENDING))
    return [output.outputs[0].token_ids for output in outputs]


def test_a_cache_is_made_to_the_size_that_was_asked_for():
    sizes = []

    def make(size):
        sizes.append(size)
        return PrefixKvCache(40, size.block_size)

    llm = LLM("hash", kv=make, block_size=4, num_blocks=7, max_model_len=100, max_num_seqs=3)
    (size,) = sizes
    assert (size.block_size, size.num_blocks, size.max_model_len, size.max_num_seqs) == (4, 7, 100, 3)
    assert llm.kv == "prefix" and llm.engine.cache.stats().num_blocks == 40
    assert llm.kv_layout.num_blocks >= 40
    assert said(llm) == said(LLM("hash"))


def test_another_engine_has_a_cache_of_its_own():
    llm = LLM("hash", kv=lambda size: PagedKvCache(40, size.block_size))
    other = llm.new_engine(max_num_seqs=1)
    assert other.cache is not llm.engine.cache and isinstance(other.cache, PagedKvCache)


def test_who_is_admitted_first_is_a_function():
    def shortest(sequence):
        return sequence.num_prompt_tokens, sequence.arrival

    llm = LLM("hash", kv="paged", order=shortest, max_num_seqs=1)
    run = llm.start(["a" * 9, "a" * 3, "a" * 6], SamplingParams(max_tokens=4, **UNENDING))
    admitted = [one.seq_id for record in run for one in record.admitted]
    assert admitted == [1, 2, 0]
    assert trace_header(llm).order == "shortest"


def test_who_gives_way_is_a_function_and_the_record_says_its_name():
    def the_first(running, requester):
        return next((sequence for sequence in running if sequence is not requester), None)

    llm = LLM("hash", kv="paged", preempt=the_first, block_size=4, num_blocks=14)
    records = list(llm.start(["a" * 8, "b" * 8, "c" * 8], SamplingParams(max_tokens=20, **UNENDING)))
    lost = [one for record in records for one in record.preempted]
    assert lost and {one.preempt for one in lost} == {"the-first"} and lost[0].seq_id == 0
    assert trace_header(llm).preempt == "the-first"


def test_a_policy_by_name_is_called_by_it():
    assert SchedulerConfig(preempt="least-progressed").preempt_name == "least-progressed"
    assert SchedulerConfig(preempt=lifo).victim_policy == ("lifo", lifo)
    assert SchedulerConfig(order="priority", preempt=lifo).victim_policy[0] == "priority"


def returning(evict) -> tuple[list[tuple[int, ...]], int, int]:
    """Tokens, prompt tokens found and evictions of one beginning that comes twice, then again after four others, in a
    pool of 12 blocks."""
    llm = LLM("hash", kv="prefix", evict=evict, block_size=4, num_blocks=12)
    beginning = "the same text "
    prompts = [beginning + "1", beginning + "2", *(letter * 17 for letter in "abcd"), beginning + "3"]
    tokens, cached = [], 0
    for prompt in prompts:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, **UNENDING))
        tokens.append(output.outputs[0].token_ids)
        cached += output.metrics.tokens_cached
    llm.engine.cache.check_invariants()
    return tokens, cached, llm.engine.cache.stats().evictions


def test_what_is_evicted_changes_what_is_found_and_no_token():
    chosen: list[Node] = []

    def newest(leaves: Iterator[Node], requests: int) -> Node:
        chosen.append(list(leaves)[-1])
        return chosen[-1]

    oldest, cheapest, latest = returning("lru"), returning("prefix-cost"), returning(newest)

    assert oldest[0] == cheapest[0] == latest[0]
    assert oldest[1:] == (12, 18) and cheapest[1:] == (24, 15) and latest[2] == len(chosen) > 0


def test_an_unknown_eviction_policy_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="unknown --evict 'mru'; supported: lru, prefix-cost"):
        LLM("hash", kv="prefix", evict="mru")


class MyScheduler(Scheduler):
    """Another class, so that it can be told apart."""


def test_a_piece_of_the_engine_is_given_to_one_model_or_stands_in_for_a_while():
    def scheduler_of(llm: LLM) -> type:
        return type(llm.engine.scheduler)

    assert scheduler_of(LLM("hash", pieces=Pieces(scheduler=MyScheduler))) is MyScheduler
    with pytest.raises(RuntimeError), standing_in(scheduler=MyScheduler):
        assert scheduler_of(LLM("hash", kv="paged")) is MyScheduler
        with standing_in(preemption=lambda *arguments: "mine"):
            llm = LLM("hash", kv="paged")
            assert scheduler_of(llm) is MyScheduler and llm.engine.scheduler.preemption == "mine"
        raise RuntimeError
    assert scheduler_of(LLM("hash")) is Scheduler


def test_a_cache_and_a_proposer_are_pieces_too():
    modes: list[object] = []

    def new_cache(mode, size, evict):
        modes.append(mode)
        return create_kv_cache("basic", size, evict)

    llm = LLM("hash", kv="paged", speculate="ngram", pieces=Pieces(kv_cache=new_cache, ngram=Same))
    assert llm.engine.cache.kind == "basic" and modes == ["paged"]
    assert [proposer.name for proposer in llm.engine.proposers] == ["same"]


class Same(Proposer):
    name = "same"

    def propose(self, requests):
        return [Proposal((request.token_ids[-1],) * request.max_tokens) for request in requests]


def test_a_proposer_guesses_from_the_beginning_or_from_later_on():
    plain = said(LLM("hash", kv="paged"), max_tokens=30)
    llm = LLM("hash", kv="paged", speculate=Same(), speculate_fixed=True)
    (proposer,) = llm.engine.proposers
    assert proposer.name == "same" and said(llm, max_tokens=30) == plain
    llm.speculate_with("off")
    assert not llm.engine.proposers
    llm.speculate_with(proposer)
    assert list(llm.engine.proposers) == [proposer] and said(llm, max_tokens=30) == plain


def test_a_model_stays_as_it_is():
    loaded = LoadedModel(name="mine", model=HashModel(), tokenizer=ByteTokenizer(), default_kv_dtype="float16")
    llm = LLM(loaded, kv="basic")
    assert load_model(loaded, pytest.fail) is loaded
    assert (llm.model, llm.model_name, llm.path, llm.kv_dtype) == (loaded.model, "mine", None, "float16")
    assert said(llm) == said(LLM("hash"))


@pytest.mark.parametrize("wrong", [{"kv": 3}, {"order": 3}, {"preempt": 3}, {"speculate": 3}])
def test_what_is_none_of_them_is_refused(wrong):
    with pytest.raises(UsageError, match="supported: "):
        LLM("hash", **wrong)
