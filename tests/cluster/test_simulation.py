"""The simulation: nothing is lost, a run is reproducible, and prefixes that are cached are not computed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.cluster.routers import ROUTERS
from forge.cluster.simulation import SimulationOptions, StepTime, Transport, fit_step_time, replay, simulate
from forge.experiments.cluster.measured import WITHIN, deviations, simulate_turns
from forge.trace.totals import percentile
from forge.workload.conversations import KnownRequest, TraceShape

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
    assert eight.balance < 1.3 and percentile(eight.ttft, 0.99) < 1.5 * percentile(one.ttft, 0.99)


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


def test_a_request_takes_its_transport_and_its_steps():
    options = SimulationOptions(replicas=1, step_time=StepTime(1.0, 0.1, 0.5), transport=Transport(0.004, 0.002))
    result = replay(options, [KnownRequest(list(range(100)), 11)] * 2, num_clients=1)
    assert result.ttft[-1] == pytest.approx(4 + 1 + 0.1 * 100 + 2) and result.tpot == pytest.approx([1.5, 1.5])
    assert result.seconds == pytest.approx(sum(result.ttft) / 1e3 + 2 * 10 * 1.5 / 1e3)


def test_clients_of_a_replay_send_one_request_at_a_time_and_every_request_once():
    requests = [KnownRequest([number] * 40, 1 + number) for number in range(30)]
    one, four = (replay(SimulationOptions(replicas=2), requests, clients) for clients in (1, 4))
    assert one.num_requests == four.num_requests == len(four.ttft) == 30 and len(four.tpot) == 29
    assert 2 * four.seconds < one.seconds


def test_the_costs_of_steps_are_found_again():
    steps = [
        (prefilled, decoded, 0.7 + 0.02 * prefilled + 0.3 * decoded)
        for prefilled in (0, 64, 512)
        for decoded in (0, 3, 8)
    ]
    fitted = fit_step_time(steps)
    assert [fitted.fixed, fitted.prefill_token, fitted.decode_token] == pytest.approx([0.7, 0.02, 0.3])


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """What `forge cluster --only run --part measured --json` wrote on a machine of 2 cores under other work."""
    return json.loads(Path(__file__).with_name("measured_run.json").read_text())


def off(run: dict[str, Any], **costs: float) -> dict[str, float]:
    results = simulate_turns(run["costs"] | costs, run["turns"], run["clients"])
    return deviations(run["two"], results)["deviation"]


def test_times_and_throughput_of_a_measured_run_are_simulated_within_a_quarter(run):
    assert all(abs(share) <= WITHIN for share in off(run).values()), off(run)


@pytest.mark.parametrize(
    ("wrong", "figure"),
    [
        ({"to_engine_ms": 0.0, "to_front_ms": 0.0}, "ttft_ms"),
        ({"prefill_token_ms": 0.0}, "ttft_ms"),
        ({"decode_token_ms": 0.0}, "tpot_ms"),
        ({"step_ms": 0.0}, "tpot_ms"),
    ],
)
def test_without_one_of_the_costs_they_are_not(run, wrong: dict[str, float], figure: str):
    assert abs(off(run, **wrong)[figure]) > WITHIN
