"""The issue's figures, on engines in this process: counts, the same in every run."""

import pytest

from forge import LLM, SamplingParams
from forge.cluster.local import LocalCluster, run_talks
from forge.cluster.routers import ROUTERS
from forge.errors import UsageError
from forge.experiments.cluster import ANSWER_TOKENS, CLIENTS, talks

PARAMS = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)


def engines(number: int, num_blocks: int = 256) -> list:
    options = {"kv": "prefix", "num_blocks": num_blocks, "max_num_seqs": CLIENTS, "threads": 1}
    return [LLM("hash", **options).engine for _ in range(number)]


def test_prefix_routing_computes_what_one_large_cache_would_and_stays_even():
    """96 multi-turn requests over 12 system prompts, two engines."""
    one = run_talks(engines(1, 512), "round-robin", talks(24), PARAMS, CLIENTS)
    turns = run_talks(engines(2), "round-robin", talks(24), PARAMS, CLIENTS)
    prefix = run_talks(engines(2), "prefix", talks(24), PARAMS, CLIENTS)
    assert len(prefix.routed) == 96
    assert prefix.computed_tokens <= 0.6 * turns.computed_tokens
    assert prefix.computed_tokens <= 1.1 * one.computed_tokens
    assert prefix.balance <= 1.3 and prefix.request_balance <= 1.3


@pytest.mark.parametrize("router", ROUTERS)
def test_no_router_changes_an_answer_and_nothing_stays_held(router: str):
    used = engines(3, 64)
    run = run_talks(used, router, talks(12), PARAMS, CLIENTS)
    assert run.answers == run_talks(engines(1), "round-robin", talks(12), PARAMS, CLIENTS).answers
    assert sum(run.requests_by_replica) == 48
    for engine in used:
        assert engine.cache.stats().used_blocks == 0 and not engine.has_unfinished()


def test_what_the_router_believes_is_cached_is_cached():
    """With events the router's number of cached tokens is never above what the engine finds, as nothing else runs."""
    run = run_talks(engines(2, 48), "prefix", talks(12), PARAMS, clients=1)
    assert all(one.decision.cached_tokens <= one.cached_tokens for one in run.routed)
    estimate = run_talks(engines(2, 48), "prefix-estimate", talks(12), PARAMS, clients=1)
    assert any(one.decision.cached_tokens > one.cached_tokens for one in estimate.routed), "the caches evict"


def test_engines_without_prefixes_are_refused():
    with pytest.raises(UsageError, match="--kv prefix"):
        LocalCluster([LLM("hash", kv="paged").engine], "prefix")
