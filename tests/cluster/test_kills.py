"""Kill after kill under load: no token is lost, none comes twice, none differs. `FORGE_ALL_TESTS=1` kills 200 times."""

import asyncio
import os
import random
import time
from dataclasses import replace

from tests.cluster.local_engines import PROMPT, LocalEngine, expected, front_of, in_a_loop, read, seed_of, submit
from tests.cluster.test_client import KILLED

KILLS = 200 if os.environ.get("FORGE_ALL_TESTS") else 4
STREAMS = 5


@in_a_loop
async def test_streams_of_every_kind_survive_every_kill():
    random_, pauses, number, resumed = random.Random(5), [], 0, 0
    engines = {name: LocalEngine() for name in "ab"}
    async with front_of(*engines.values()) as client:
        for kill in range(KILLS):
            for engine in engines.values():
                engine.pause = 0.002
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
            await asyncio.sleep(random_.uniform(0.005, 0.12))
            victim = random_.choice(list(engines))
            engines.pop(victim).kill()
            client.leave(victim)
            killed = time.monotonic()
            found = await asyncio.gather(*readers)
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
            async with asyncio.timeout(10):
                while name not in client._links:
                    await asyncio.sleep(0.002)
        resumed = client.num_resumed
        assert not client._requests and not client.pools["engines"].fleet._on_the_way
    for engine in engines.values():
        assert engine.is_idle
        engine.kill()
    assert resumed >= KILLS / 2
    pauses.sort()
    print(f"{KILLS} kills, {resumed} requests resumed; pause p50 {pauses[len(pauses) // 2] * 1e3:.0f} ms,", end=" ")
    print(f"p99 {pauses[int(0.99 * len(pauses))] * 1e3:.0f} ms")
