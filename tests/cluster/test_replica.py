"""What runs in a replica, without Ray: requests, reports, hand-overs, and an engine that dies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from forge import LLM, SamplingParams
from forge.cluster.fleet import RouteRequest
from forge.cluster.metrics import ClusterMetrics
from forge.cluster.replica import EngineReplica, ReplicaFailed, Report
from forge.server.messages import Gauges, LoadFailed, Submit

ROUTE = RouteRequest("r")
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = list(b"Once upon a time there was a fox who lived by the mill")


def submit(key: int, params: SamplingParams = PARAMS, stream: bool = True) -> Submit:
    return Submit(key, f"request-{key}", PROMPT, params, None, 0, "", stream)


@asynccontextmanager
async def replica(**options) -> AsyncIterator[EngineReplica]:
    made = EngineReplica.__new__(EngineReplica)
    await made.__init__(lambda: "a", "hash", {"kv": "prefix", "threads": 1, "check": True, **options})
    try:
        yield made
    finally:
        if hasattr(made, "_transport"):
            made._transport.abort()


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    run.__name__ = test.__name__
    return run


async def outputs(stream) -> tuple[list[int], tuple[int, ...]]:
    """The tokens that came one by one, and those of the output."""
    tokens, output = [], None
    async for update in stream:
        tokens += [token[2] for token in update.tokens]
        output = update.ends[0].output if update.ends else output
    return tokens, output.outputs[0].token_ids


@in_a_loop
async def test_requests_at_once_each_get_their_own_tokens():
    wanted = LLM("hash", kv="prefix", threads=1).generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    async with replica() as one:
        found = await asyncio.gather(*[outputs(one.generate(ROUTE, submit(key))) for key in range(5)])
        assert found == [(list(wanted), wanted)] * 5
        whole = await outputs(one.generate(ROUTE, submit(9, stream=False)))
        assert whole == ([], wanted) and not one._streams


@in_a_loop
async def test_a_caller_that_goes_away_aborts_its_request():
    async with replica() as one:
        stream = one.generate(ROUTE, submit(0, SamplingParams(max_tokens=2000, ignore_eos=True)))
        async for update in stream:
            if update.tokens:
                break
        await stream.aclose()
        while one._gauges.used_blocks or one._gauges.running:
            await asyncio.sleep(0.01)


@in_a_loop
async def test_a_follower_learns_first_all_blocks_and_then_the_changes():
    async with replica() as one:
        await outputs(one.generate(ROUTE, submit(0)))
        first = await anext(one.follow(RouteRequest("f", target="a")))
        assert first.whole and len(first.events.published) == (len(PROMPT) + 5) // 16
        assert first.events.published[0] == one._engine.engine.cache.prefix_keys(PROMPT)[0]
        stream = one.follow(RouteRequest("f", target="a"))
        await anext(stream)
        other = Submit(1, "other", [98] * 40, PARAMS, None, 0, "", True)
        await outputs(one.generate(ROUTE, other))
        report = await anext(stream)
        assert not report.whole and report.steps and report.events.published and report.gauges is not None


@in_a_loop
async def test_a_prompt_is_handed_over_and_continued_elsewhere():
    wanted = LLM("hash", kv="prefix", threads=1).generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    async with replica() as prefills, replica() as decodes:
        handoff = await prefills.prefill(ROUTE, submit(0))
        assert handoff.position == len(PROMPT) - 1 and not prefills._engine.handed_off
        assert prefills._engine.engine.cache.stats().used_blocks == 0
        assert (await outputs(decodes.generate(ROUTE, submit(0), handoff)))[1] == wanted
        timeline = (await decodes.ask(ROUTE, "timeline", ("request-0",))).value
        assert any("handed over" in event["why"] for event in timeline["events"])


@in_a_loop
async def test_a_request_that_cannot_run_is_refused_and_none_is_handed_over():
    async with replica(max_model_len=32) as one:
        updates = [update async for update in one.generate(ROUTE, submit(0))]
        assert updates[-1].refused and "32" in updates[-1].refused[0].fault.message
        assert await one.prefill(ROUTE, submit(1)) is None and not one._engine.prefills


@in_a_loop
async def test_what_is_for_another_replica_is_not_answered():
    async with replica() as one:
        with pytest.raises(ReplicaFailed, match="replica b no longer runs"):
            await one.ask(RouteRequest("q", target="b"), "timeline", ("x",))


@in_a_loop
async def test_when_the_engine_dies_its_requests_fail_and_so_does_the_health_check():
    async with replica() as one:
        stream = one.generate(ROUTE, submit(0, SamplingParams(max_tokens=2000, ignore_eos=True)))
        await anext(stream)
        one._engine._open = False
        with pytest.raises(ReplicaFailed, match="has died"):
            await outputs(stream)
        with pytest.raises(ReplicaFailed, match="has died"):
            await one.check_health()


@in_a_loop
async def test_a_model_that_does_not_load_is_told_and_not_started_again():
    async with replica(max_model_len=10**9) as one:
        await one.check_health()
        failed = await one.ready(ROUTE)
        assert isinstance(failed, LoadFailed) and failed.exit_code == 2 and "--max-model-len" in failed.message


@in_a_loop
async def test_metrics_have_each_name_once_and_each_replica_below_it():
    async with replica() as one:
        metrics = ClusterMetrics("hash", await one.ready(ROUTE), lambda request_id: "left")
        for name, running in (("left", 2), ("right", 3)):
            metrics.take_report(name, Report(clock=1.0, gauges=Gauges(running=running)), 1.001)
        async for update in one.generate(ROUTE, submit(0)):
            for end in update.ends:
                metrics.take_output(end.output, PARAMS, end.output.metrics.arrived)
        metrics.leave("right")
        text = metrics.text(Gauges())
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert 'vllm:num_requests_running{model_name="hash",engine="0",replica="left"} 2' in text
    assert 'replica="right"' not in text
    assert f'vllm:prompt_tokens_total{{model_name="hash",engine="0",replica="left"}} {len(PROMPT)}' in text
