"""Fault after fault under load: no token is lost, none comes twice, none differs."""

import asyncio
import random
import time
from dataclasses import replace

import pytest

from tests.cluster.local_engines import PROMPT, LocalEngine, expected, front_of, read, seed_of, submit
from tests.cluster.test_client import KILLED
from tests.waiting import eventually, until

STREAMS = 5


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["killed", "every step raises"])
def test_streams_of_every_kind_survive_every_kill(kills: int, fault: str):
    asyncio.run(asyncio.wait_for(survive(kills, fault), 600))


async def survive(kills: int, fault: str) -> None:
    random_, pauses, number, resumed = random.Random(5), [], 0, 0
    engines = {name: LocalEngine() for name in "ab"}
    async with front_of(*engines.values()) as client:
        for kill in range(kills):
            for engine in engines.values():
                engine.hold_after(random_.randrange(24))  # the shortest grammar needs as many
            cases = [random_.choice(list(KILLED)) for _ in range(STREAMS)]
            prompts = [[*PROMPT, random_.randrange(97, 123)] for _ in cases]
            generations = [
                submit(client, f"r{kill}-{index}", replace(KILLED[case], max_tokens=60), prompt)
                for index, (case, prompt) in enumerate(zip(cases, prompts, strict=True))
            ]
            seeds = [seed_of(client, generation) for generation in generations]
            came = [[time.monotonic()] for _ in generations]
            readers = [
                asyncio.create_task(read(generation, lambda _, times=times: times.append(time.monotonic())))
                for generation, times in zip(generations, came, strict=True)
            ]
            await eventually(lambda: any(engine.is_held for engine in engines.values()))
            victim = random_.choice([name for name, engine in engines.items() if engine.is_held])
            failing = engines.pop(victim)
            if fault == "killed":
                failing.kill()
                client.leave(victim)
            else:
                failing.break_steps()
                failing.go_on()
            for engine in engines.values():
                engine.go_on()
            killed = time.monotonic()
            found = await asyncio.gather(*readers)
            if fault != "killed":
                client.leave(victim)
                failing.kill()
            for case, prompt, seed, choices in zip(cases, prompts, seeds, found, strict=True):
                assert choices == expected(replace(KILLED[case], max_tokens=60), seed, prompt), (kill, case)
            for times in came:
                after = [moment for moment in times if moment > killed]
                before = [moment for moment in times if moment <= killed]
                if after and before:
                    pauses.append(after[0] - before[-1])
            number += 1
            name = f"c{number}"
            engines[name] = LocalEngine()
            client.join(name, "engines", engines[name].address)
            await eventually(lambda name=name: name in client._links)
        resumed = client.num_resumed
        assert not client._requests and not client.pools["engines"].fleet._on_the_way
    for engine in engines.values():
        assert until(lambda engine=engine: engine.is_idle)
        engine.kill()
    assert resumed >= kills
    pauses.sort()
    print(f"{kills} kills, {resumed} requests resumed; pause p50 {pauses[len(pauses) // 2] * 1e3:.0f} ms,", end=" ")
    print(f"p99 {pauses[int(0.99 * len(pauses))] * 1e3:.0f} ms")
