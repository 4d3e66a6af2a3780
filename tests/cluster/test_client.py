"""A front and its engines, without Ray: requests, faults, and streams that survive the death of their engine."""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from forge import SamplingParams
from forge.cluster import fleet as fleet_module
from forge.cluster.client import NoHealthyReplica
from forge.cluster.control import Joined
from forge.cluster.launch import ClusterFront
from forge.cluster.wire import MIN_PROMPT
from forge.engine.outputs import RequestOutput
from forge.engine.structured_output import StructuredOutput
from forge.engine.task import Task
from forge.errors import UsageError
from forge.server.app import _NativeAnswer
from forge.server.engine_client import Generation, Prompt, RequestFailed
from forge.server.exchange import _CURRENT, Exchange
from forge.server.resumption import parse_event_id
from tests.cluster.local_engines import (
    PARAMS,
    PROMPT,
    LocalEngine,
    expected,
    front_of,
    in_a_loop,
    read,
    seed_of,
    stream_of,
    submit,
)
from tests.waiting import eventually

SEEDED = replace(PARAMS, seed=7)


@in_a_loop
async def test_requests_at_once_each_get_their_own_tokens_from_both_engines():
    a, b = LocalEngine(), LocalEngine()
    async with front_of(a, b) as client:
        prompts = [[*PROMPT, 97 + number] for number in range(12)]
        generations = [submit(client, f"r{n}", SEEDED, prompt) for n, prompt in enumerate(prompts)]
        found = await asyncio.gather(*map(read, generations))
        assert found == [expected(SEEDED, 7, prompt) for prompt in prompts]
        assert {client.replica_of(f"r{n}") for n in range(12)} == {"a", "b"}
        outputs = await generations[0].finished()
        assert outputs[0].outputs[0].text == found[0][0][0]
        assert not client._requests and not client.pools["engines"].fleet._on_the_way
        await eventually(lambda: a.is_idle and b.is_idle)
        await eventually(lambda: not sum(one.tokens for one in client.pools["engines"].fleet.replicas.values()))
    a.kill(), b.kill()


KILLED = {
    "sampled": PARAMS,
    "three samples": replace(PARAMS, n=3),
    "log probabilities": replace(PARAMS, logprobs=2),
    "a grammar": replace(PARAMS, structured=StructuredOutput(regex="(ab|ba|cc){12,19}"), ignore_eos=False),
    "penalties": replace(PARAMS, frequency_penalty=0.7, repetition_penalty=1.2),
}


@pytest.mark.parametrize("case", KILLED)
def test_a_stream_goes_on_with_its_very_tokens_when_its_engine_dies(case: str):
    @in_a_loop
    async def run() -> None:
        params, engines = KILLED[case], {"a": LocalEngine(), "b": LocalEngine()}
        for engine in engines.values():
            engine.hold_after(8)
        async with front_of(*engines.values()) as client:
            generation = submit(client, "r", params)
            seed, killed = seed_of(client, generation), []

            def kill(number: int) -> None:
                if number >= 5 and not killed:
                    killed.append(client.replica_of("r"))
                    engines[killed[0]].kill()
                    for name in engines.keys() - killed:
                        engines[name].go_on()

            assert await read(generation, kill) == expected(params, seed)
            assert client.replica_of("r") not in killed and client.num_resumed == 1
            (output,) = await generation.finished()
            assert [sample.text for sample in output.outputs] == [sample[0] for sample in expected(params, seed)]
        for engine in engines.values():
            engine.kill()

    run()


@in_a_loop
async def test_a_resumed_request_tells_of_all_its_tokens_and_of_its_own_first_one():
    engines = {"a": LocalEngine(), "b": LocalEngine()}
    for engine in engines.values():
        engine.slow_down(0.003)
    async with front_of(*engines.values()) as client:
        outputs, seen, killed = [], [], []
        take_output = client.metrics.take_output

        def take(output: RequestOutput, params: SamplingParams, arrived: float) -> None:
            outputs.append((output, arrived))
            take_output(output, params, arrived)

        client.metrics.take_output = take
        generation = submit(client, "r", SEEDED)

        def kill(number: int) -> None:
            seen.append(time.perf_counter())
            if number >= 5 and not killed:
                killed.append(client.replica_of("r"))
                engines.pop(killed[0]).kill()

        await read(generation, kill)
        ((output, arrived),) = outputs
        times = output.outputs[0].metrics
        assert times.arrived == arrived == generation.arrived < times.first_token <= seen[0]
        (name,) = engines
        text = client.metrics.text("hash")
        assert f'replica="{name}"' in text and f'replica="{killed[0]}"' not in text, "the dead one's series are gone"
        assert 'replica=""' not in text
        timeline = await client.ask("timeline", "r")
        (sample,) = timeline["samples"]
        known = [token for token in sample["tokens"] if token]
        assert len(sample["tokens"]) == 40 and 0 < len(known) <= 35 and sample["tokens"][-len(known) :] == known
        assert timeline["events"][0]["why"] == f"resumed behind {40 - len(known)} tokens of another engine"
        answering = asyncio.create_task(client.ask("timeline", "r"))
        engines[name].kill()
        assert await answering is None, "no engine knows it any more"
        reader, tokenizer = SimpleNamespace(model_names=["hash"]), engines[name].llm.tokenizer
        answer = _NativeAnswer(generation, SimpleNamespace(client=client, reader=reader, tokenizer=tokenizer))
        body = json.loads(await answer.whole(await generation.finished()))
        assert len(body["choices"][0]["tokens"]) == 40 and body["id"] == "r"


@in_a_loop
async def test_an_engine_whose_ray_has_ended_goes_on_for_its_fronts_and_ends_with_the_last_of_them():
    """Only its actor's end tells the engine; where Ray goes on, the engine ends too."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet:
        engine = LocalEngine(raylet=raylet.pid)
        engine.slow_down(0.003)
        async with front_of(engine) as client:
            generation = submit(client, "r", SEEDED)

            def end(number: int) -> None:
                if number == 5:
                    raylet.kill()
                    os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)  # as one whose parent has ended too
                    engine.lose_actor()

            assert await read(generation, end) == expected(SEEDED, 7)
            assert await read(submit(client, "s", SEEDED)) == expected(SEEDED, 7)
            assert client.num_resumed == 0 and not engine.has_ended
        await eventually(lambda: engine.has_ended)


@in_a_loop
async def test_engines_of_a_ray_that_has_ended_take_requests_until_one_of_the_next_is_connected_to():
    old, new, prefill = LocalEngine(), LocalEngine(), LocalEngine()
    async with front_of(old, prefills=(prefill,)) as client:
        front = ClusterFront.__new__(ClusterFront)
        queue: asyncio.Queue = asyncio.Queue()
        front.client, front._is_private, front._changing = client, True, None
        front._keeper = SimpleNamespace(close=lambda: None)
        front._start_keeper = lambda again: SimpleNamespace(messages=messages)
        follow_up: asyncio.Queue = asyncio.Queue()

        async def messages() -> asyncio.Queue:
            return follow_up

        following = asyncio.create_task(front._follow(queue))
        queue.put_nowait(None)  # the keeper has ended
        follow_up.put_nowait(Joined("b", "engines", new.address, ""))
        seen = set()
        async with asyncio.timeout(60):
            while "b" not in client.pools["engines"].fleet.replicas:
                seen.add(client.is_ready)
                await asyncio.sleep(0)
        assert seen == {True}
        await eventually(lambda: client.replicas("engines") == {"b"})
        assert client.replicas("prefills") == {"p"}, "no other of its kind has joined"
        following.cancel()
    old.kill(), new.kill(), prefill.kill()


@in_a_loop
async def test_a_stream_that_has_begun_goes_on_at_its_own_version_of_the_model_only():
    a, b, c = (LocalEngine() for _ in range(3))
    a.slow_down(0.003)
    async with front_of(a) as client:
        generation, steps = submit(client, "r", SEEDED), []

        async def update() -> None:
            client.join("b", "engines", b.address, "new")
            await eventually(lambda: "b" in client._links)
            a.kill()
            client.leave("a")
            fresh = submit(client, "s", SEEDED)
            assert await read(fresh) == expected(SEEDED, 7) and client.replica_of("s") == "b"
            steps.append(b.server._num_steps)
            assert not generation.ended and client._homeless
            client.join("c", "engines", c.address)
            await eventually(lambda: "c" in client._links)
            seen = parse_event_id(fresh.position.mark(b"data\n\n").decode().split("id: ")[1].strip())
            client.leave("b")
            await eventually(lambda: "b" not in client._links)
            with pytest.raises(UsageError, match="of a model that was replaced"):
                await client.resume(seen, stream_of(SEEDED))

        updating = []
        found = await read(
            generation,
            lambda number: updating or updating.append(asyncio.create_task(update())) if number > 3 else None,
        )
        await updating[0]
        assert found == expected(SEEDED, 7) and client.replica_of("r") == "c" and b.server._num_steps == steps[0]
    b.kill(), c.kill()


@in_a_loop
async def test_the_last_engine_leaves_when_the_next_is_connected_to_and_no_request_is_refused_between():
    a, b = LocalEngine(), LocalEngine()
    async with front_of(a) as client:
        client.join("b", "engines", b.address)
        client.leave("a")
        assert await read(submit(client, "r", SEEDED)) == expected(SEEDED, 7)
        await eventually(
            lambda: "b" in client._links and client.replicas("engines") == {"b"} and "a" not in client._links
        )
        assert await read(submit(client, "s", SEEDED)) == expected(SEEDED, 7) and client.replica_of("s") == "b"
        client.leave("b")
        with pytest.raises(NoHealthyReplica):
            submit(client, "t", SEEDED)
    a.kill(), b.kill()


@in_a_loop
async def test_a_stream_survives_more_deaths_than_attempts_because_each_engine_brought_tokens():
    engines = [LocalEngine() for _ in range(2)]
    for engine in engines:
        engine.hold_after(22)
    async with front_of(*engines) as client:
        by_name = dict(zip("ab", engines, strict=True))
        generation = submit(client, "r", replace(SEEDED, max_tokens=120))
        deaths = []

        def kill(number: int) -> None:
            if number > 20 * (len(deaths) + 1) and len(deaths) < 5:
                name = client.replica_of("r")
                deaths.append(name)
                by_name[name].kill()
                client.leave(name)
                by_name[f"{name}'"] = again = LocalEngine()
                again.hold_after(22)
                client.join(f"{name}'", "engines", again.address)

        assert await read(generation, kill) == expected(replace(SEEDED, max_tokens=120), 7)
        assert len(deaths) == 5
    for engine in by_name.values():
        engine.kill()


@in_a_loop
async def test_an_engine_whose_steps_raise_gets_no_requests_and_none_is_lost():
    a, b = LocalEngine(), LocalEngine()
    async with front_of(a, b, router="least-tokens") as client:
        a.break_steps()
        alone = expected(SEEDED, 7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleet_module, "FIRST_PAUSE", fleet_module.LONGEST_PAUSE)  # no trial while this runs
            for number in range(30):
                assert await read(submit(client, f"r{number}", SEEDED)) == alone
        went = [client.pools["engines"].decisions[f"r{number}"].replica for number in range(30)]
        assert set(went) == {"b"} and client.num_resumed <= fleet_module.FAILURES, (
            "it is asked a few times, and then left alone"
        )
        assert client.pools["engines"].fleet.num_healthy == 1 and client.is_ready
    a.kill(), b.kill()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@in_a_loop
async def test_a_stream_goes_on_elsewhere_when_the_loop_of_its_engine_raises_and_health_tells():
    engines = {"a": LocalEngine(), "b": LocalEngine()}
    for engine in engines.values():
        engine.hold_after(8)
    async with front_of(*engines.values()) as client:
        generation, broken = submit(client, "r", SEEDED), []

        def break_its_loop(number: int) -> None:
            if number >= 5 and not broken:
                broken.append(client.replica_of("r"))
                engines[broken[0]].break_loop()
                for engine in engines.values():
                    engine.go_on()

        found = await asyncio.wait_for(read(generation, break_its_loop), 20)
        assert found == expected(SEEDED, 7)
        assert broken and client.num_resumed == 1
        (other,) = engines.keys() - broken
        assert client._links.keys() == {other} and client.is_ready
        engines[other].break_loop()
        waiting = asyncio.create_task(read(submit(client, "next", SEEDED)))
        await eventually(lambda: not client._links)
        with pytest.raises(NoHealthyReplica):
            client.check_ready()
        assert client.probe(1.0), "the front itself lives"
        waiting.cancel()


@in_a_loop
async def test_a_request_that_every_engine_fails_at_ends_with_an_error_and_is_counted():
    a = LocalEngine()
    async with front_of(a) as client:
        a.break_steps()
        with pytest.raises(RequestFailed, match="3 engines failed at this request, the last because the step"):
            await read(submit(client, "r", SEEDED))
        assert 'finished_reason="error"} 1' in client.metrics.text("hash")
        assert not client.is_ready and not client._requests
        assert client.probe(1.0), "the front itself lives"
        client._loop_tasks[0].cancel()
        await eventually(lambda: not client.probe(1.0))
    a.kill()


@in_a_loop
async def test_an_engine_that_stands_still_is_given_up_and_its_stream_goes_on():
    a, b = LocalEngine(), LocalEngine()
    async with front_of(a, b) as client:
        engines = {"a": a, "b": b}
        for engine in engines.values():
            engine.hold_after(6)  # one of them for good
        generation, stopped = submit(client, "r", SEEDED), []

        def stop(number: int) -> None:
            if number >= 3 and not stopped:
                stopped.append(client.replica_of("r"))
                engines["b" if stopped == ["a"] else "a"].go_on()
                link = client._links[stopped[0]][1]
                link.pulse.last_seen -= 10.0  # and no pulse came
                link.pulse.data_received = lambda data: None

        assert await read(generation, stop) == expected(SEEDED, 7)
        assert stopped and client.num_resumed == 1


@in_a_loop
async def test_without_an_engine_a_new_request_is_refused_at_once_and_a_running_one_waits_for_the_next():
    a = LocalEngine()
    a.hold_after(6)
    async with front_of(a) as client:
        generation, later, killed = submit(client, "r", SEEDED), LocalEngine(), []

        async def replace_it() -> None:
            await eventually(lambda: "a" not in client._links)
            assert not client.is_ready
            with pytest.raises(NoHealthyReplica, match="no engine can be reached"):
                submit(client, "q", SEEDED)
            client.leave("a")
            client.join("b", "engines", later.address)

        def kill(number: int) -> None:
            if number >= 4 and not killed:
                killed.append("a")
                a.kill()

        replacing = asyncio.create_task(replace_it())
        assert await read(generation, kill) == expected(SEEDED, 7)
        await replacing
    later.kill()


@in_a_loop
async def test_one_shots_are_answered_elsewhere_when_an_engine_fails():
    a, b = LocalEngine(), LocalEngine()
    async with front_of(a, b) as client:
        asked = [(PROMPT, Task(candidates=(97, 98)))]
        fine = await client.answer(asked)
        a.break_steps()
        for _ in range(4):
            again = await client.answer(asked)
            assert [one.candidates for one in again] == [one.candidates for one in fine]
        assert not client._asked
    a.kill(), b.kill()


@in_a_loop
async def test_a_client_that_leaves_ends_its_request_and_is_counted_where_it_was():
    a = LocalEngine()
    a.slow_down(0.003)
    async with front_of(a) as client:
        generation = submit(client, "r", replace(SEEDED, max_tokens=2000))
        async for _ in generation.updates():
            break
        client.abort(generation)
        await eventually(lambda: a.is_idle)
        text = client.metrics.text("hash")
        assert 'replica="a",finished_reason="abort"} 1' in text and 'replica=""' not in text
    a.kill()


@in_a_loop
async def test_a_front_that_dies_leaves_no_work_behind_and_another_knows_its_tokens():
    a = LocalEngine()
    a.slow_down(0.003)
    async with front_of(a) as other:
        async with front_of(a) as client:
            generation = submit(client, "r", replace(SEEDED, max_tokens=2000))
            await eventually(lambda: len(client._requests[generation.keys[0]].token_ids[0]) > 5)
        await eventually(lambda: a.is_idle)
        seed, (tokens,) = await other.tokens_of("r")
        assert seed == 7 and len(tokens) > 5 and await other.tokens_of("unknown") is None
        again = replace(SEEDED, max_tokens=len(tokens))
        assert list(tokens) == expected(again, 7)[0][1]
    a.kill()


@in_a_loop
async def test_two_fronts_share_engines_and_see_each_others_load():
    a = LocalEngine()
    async with front_of(a) as one, front_of(a) as two:
        a.slow_down(0.003)
        generation = submit(one, "r", replace(SEEDED, max_tokens=4000))
        await eventually(lambda: two.pools["engines"].fleet.replicas["a"].requests == 1)
        assert await read(submit(two, "q", SEEDED)) == expected(SEEDED, 7)
        one.abort(generation)
        await eventually(lambda: two.pools["engines"].fleet.replicas["a"].tokens == 0)
    a.kill()


@in_a_loop
async def test_a_prefix_goes_where_it_is_cached_also_by_another_fronts_request():
    a, b = LocalEngine(), LocalEngine()
    async with front_of(a, b) as one, front_of(a, b) as two:
        await read(submit(one, "r", SEEDED))
        where = one.replica_of("r")
        await eventually(lambda: two.pools["engines"].fleet.prefixes.holders)
        await read(submit(two, "q", SEEDED, [*PROMPT, 1, 2]))
        decision = two.pools["engines"].decisions["q"]
        assert (decision.replica, decision.why, decision.cached_tokens) == (where, "prefix", len(PROMPT) // 16 * 16)
    a.kill(), b.kill()


@in_a_loop
async def test_a_prompt_is_computed_by_one_engine_and_continued_by_another():
    p, a = LocalEngine(), LocalEngine()
    async with front_of(a, prefills=(p,)) as client:
        assert await read(submit(client, "r", SEEDED)) == expected(SEEDED, 7)
        timeline = await client.ask("timeline", "r")
        assert any("handed over" in event["why"] for event in timeline["events"])
        assert (timeline["route"]["replica"], timeline["prefill_route"]["replica"]) == ("a", "p")
        assert a.llm.engine.cache.stats().used_blocks == p.llm.engine.cache.stats().used_blocks == 0
        assert await read(submit(client, "s", SEEDED, PROMPT[: MIN_PROMPT - 1])) == expected(SEEDED, 7, PROMPT[:1])
        assert {name: one.tokens for pool in client.pools.values() for name, one in pool.fleet.replicas.items()} == {
            "a": 0,
            "p": 0,
        }
        p.break_steps()
        with pytest.raises(RequestFailed):
            await read(submit(client, "t", SEEDED))
    p.kill(), a.kill()


@in_a_loop
async def test_a_prefill_engine_that_dies_loses_no_request():
    p, q, a = LocalEngine(), LocalEngine(), LocalEngine()
    p.hold_after(0)
    async with front_of(a, prefills=(p, q)) as client:
        generations = [submit(client, f"r{n}", SEEDED, [*PROMPT, n]) for n in range(4)]
        await eventually(p.llm.engine.scheduler.has_unfinished)
        p.kill()
        found = await asyncio.gather(*map(read, generations))
        assert found == [expected(SEEDED, 7, [*PROMPT, n]) for n in range(4)]
    q.kill(), a.kill()


def test_one_id_is_in_every_line_of_a_request_at_its_front_and_at_each_engine_that_had_it(caplog):
    caplog.set_level("INFO", "forge.engine")

    @in_a_loop
    async def run() -> None:
        p, engines = LocalEngine(), {"a": LocalEngine(), "b": LocalEngine()}
        for engine in engines.values():
            engine.hold_after(8)
        async with front_of(*engines.values(), prefills=(p,)) as client:
            client.is_traced = True
            _CURRENT.set(Exchange("abc-1", "POST", "127.0.0.1"))
            generation, killed = submit(client, "r", SEEDED), []
            _CURRENT.set(None)

            def kill(number: int) -> None:
                if number >= 5 and not killed:
                    killed.append(client.replica_of("r"))
                    engines[killed[0]].kill()
                    for name in engines.keys() - killed:
                        engines[name].go_on()

            assert await read(generation, kill) == expected(SEEDED, 7)
            assert await read(submit(client, "s", SEEDED)) == expected(SEEDED, 7), "of another request, without an id"
            (name,) = killed
        lines = [line for line in caplog.messages if "abc-1" in line]
        computed, continued, failed, resumed = lines
        cached = len(PROMPT) - 1
        assert computed == f"[abc-1] r is computed for another engine: {cached} tokens"
        assert continued == f"[abc-1] r goes on behind {cached} prompt tokens that another engine has computed"
        assert failed.startswith(f"[abc-1] replica {name} failed at r (")
        assert resumed.startswith("[abc-1] r goes on behind ") and resumed.endswith(" tokens of another engine")
        for engine in (p, *engines.values()):
            engine.kill()

    run()


@in_a_loop
async def test_a_load_of_a_prefill_engine_ends_with_the_hand_over():
    p, a = LocalEngine(), LocalEngine()
    a.slow_down(0.01)
    async with front_of(a, prefills=(p,)) as client:
        generation = submit(client, "r", replace(SEEDED, max_tokens=4000))
        await eventually(lambda: client.pools["engines"].fleet.replicas["a"].requests == 1)
        assert client.pools["prefills"].fleet.replicas["p"].tokens == 0
        client.abort(generation)
    p.kill(), a.kill()


@in_a_loop
async def test_a_request_that_cannot_run_is_refused_by_its_own_fault():

    a, p = LocalEngine(max_model_len=32), LocalEngine(max_model_len=32)
    async with front_of(a) as client:
        generation = submit(client, "r", SEEDED)
        with pytest.raises(UsageError, match="32"):
            await generation.accepted()
        assert not client._requests and client.is_ready
    async with front_of(a, prefills=(p,)) as client:
        with pytest.raises(UsageError, match="32"):
            await submit(client, "r", SEEDED).accepted()
    a.kill(), p.kill()


@in_a_loop
async def test_several_prompts_of_one_request_survive_too():
    a, b = LocalEngine(), LocalEngine()
    for engine in (a, b):
        engine.hold_after(5)
    async with front_of(a, b, router="round-robin") as client:
        prompts = [Prompt([*PROMPT, number]) for number in range(4)]
        generation = Generation("r", prompts, SEEDED)
        client.submit(generation)
        await eventually(lambda: a.llm.engine.scheduler.has_unfinished() and b.llm.engine.scheduler.has_unfinished())
        a.kill(), b.go_on()
        outputs = await generation.finished()
        texts = [output.outputs[0].text for output in outputs]
        assert texts == [expected(SEEDED, 7, prompt.token_ids)[0][0] for prompt in prompts]
    b.kill()


@in_a_loop
async def test_a_subscriber_to_records_sees_the_steps_of_all_engines_and_why_requests_came():
    a, b = LocalEngine(), LocalEngine()
    async with front_of(a, b, router="round-robin") as client:
        records: asyncio.Queue = asyncio.Queue()
        client.watch(records.put_nowait)
        await eventually(lambda: a.server._watched and b.server._watched)
        await asyncio.gather(*[read(submit(client, f"r{n}", SamplingParams(max_tokens=3))) for n in range(2)])
        seen = [await records.get() for _ in range(4)]
        assert {record.replica for record in seen} == {"a", "b"}
        assert {route.router for record in seen for route in record.routes} == {"round-robin"}
    a.kill(), b.kill()


@in_a_loop
async def test_a_live_view_sees_the_steps_of_engines_that_were_connected_to_before_it():
    a, records = LocalEngine(), []
    async with front_of(a) as client:
        client.on_record = records.append
        await client.connect()  # as a front's server does once more, with its view
        await eventually(lambda: a.server._watched)
        await read(submit(client, "r", SamplingParams(max_tokens=3)))
        await eventually(lambda: len(records) >= 3)
    a.kill()


@pytest.mark.parametrize("case", ["sampled", "three samples", "log probabilities"])
def test_a_client_of_a_dead_front_reads_the_rest_from_another(case: str):
    """From tokens that an engine remembers, or, with log probabilities, from the seed alone."""

    @in_a_loop
    async def run() -> None:
        params, a = KILLED[case], LocalEngine()
        a.slow_down(0.002)
        async with front_of(a) as other:
            async with front_of(a) as client:
                generation = submit(client, "r", params)
                position, texts = generation.position, [""] * params.n
                async for deltas in generation.updates():
                    for delta in deltas:
                        position.is_new(delta)
                        texts[delta.choice] += delta.text
                    if sum(map(len, texts)) > 12 * params.n:
                        break
                seed = seed_of(client, generation)
            seen = parse_event_id(position.mark(b"data\n\n").decode().split("id: ")[1].strip())
            assert seen.seed == seed
            await eventually(lambda: a.is_idle)
            rest, by_id = stream_of(params), stream_of(params)
            await other.resume(seen, rest)
            async for deltas in rest.updates():
                for delta in deltas:
                    if rest.position.is_new(delta):
                        texts[delta.choice] += delta.text
            assert texts == [text for text, *_ in expected(params, seed)]
            await other.resume(replace(seen, tokens=(), ended=()), by_id)
            assert await read(by_id) == expected(params, seed)
            with pytest.raises(UsageError, match="no engine remembers the request cmpl-none"):
                await other.resume(parse_event_id("cmpl-none"), stream_of(params))
            with pytest.raises(UsageError, match="another request"):
                await other.resume(seen, stream_of(params, [*PROMPT, 1]))
        a.kill()

    run()
