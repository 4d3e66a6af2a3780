"""The simulation: nothing is lost, a run is reproducible, and prefixes that are cached are not computed."""

from dataclasses import replace

import pytest

from forge.cluster.routers import ROUTERS
from forge.cluster.simulation import SimulationOptions, StepTime, simulate
from forge.workload.conversations import TraceShape

TRACE = TraceShape(num_requests=400)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_is_answered_once_at_some_replica(router: str):
    result = simulate(SimulationOptions(replicas=4, router=router, trace=TRACE))
    assert result.num_requests == sum(result.requests_by_replica) == len(result.ttft) == 400
    assert 0 < result.computed_tokens <= result.prompt_tokens
    assert sum(result.reasons.values()) == 400


def test_the_same_options_give_the_same_run():
    options = SimulationOptions(replicas=4, trace=TRACE)
    first, second = simulate(options), simulate(options)
    assert first.ttft == second.ttft and first.requests_by_replica == second.requests_by_replica


@pytest.mark.parametrize("replicas", [2, 8])
def test_how_long_an_answer_may_become_changes_no_decision(replicas: int):
    options = SimulationOptions(replicas=replicas, trace=TRACE)
    known, unknown = simulate(options), simulate(replace(options, max_tokens=1500))
    assert unknown.hit_rate == known.hit_rate and unknown.reasons == known.reasons


def test_several_fronts_see_each_others_requests():
    """With routers that knew of their own requests alone, each of eight would fill the same replicas."""
    options = SimulationOptions(replicas=8, router="least-tokens", trace=TRACE)
    one, eight = simulate(options), simulate(replace(options, fronts=8))
    assert eight.balance < 1.3 and eight.ttft_ms(0.99) < 1.5 * one.ttft_ms(0.99)


def test_sixteen_fronts_spread_requests_nearly_as_one():
    """They know what all of them gave to an engine."""
    options = SimulationOptions(
        replicas=64, step_time=StepTime(0.3, 0.005, 0.01), trace=replace(TRACE, num_requests=800)
    )
    assert simulate(replace(options, fronts=16)).balance < 1.5 * simulate(options).balance


def test_prefix_routing_computes_less_than_taking_turns():
    taking_turns, prefix = (
        simulate(SimulationOptions(replicas=8, router=router, trace=TRACE)) for router in ("round-robin", "prefix")
    )
    assert 1 - prefix.hit_rate < 0.8 * (1 - taking_turns.hit_rate)


def test_a_cache_too_small_for_a_request_ends_it_and_loses_nothing():
    result = simulate(SimulationOptions(replicas=2, num_blocks=30, trace=TRACE))
    assert result.num_requests == 400
