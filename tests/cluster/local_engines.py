"""Engines of replicas on threads of this process, and a front for them: all of a cluster but Ray."""

import asyncio
import math
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from forge import LLM, SamplingParams
from forge.cluster.client import ENGINES, PREFILLS, ClusterClient
from forge.cluster.replica_engine import ReplicaEngine
from forge.cluster.wire import Address, listen
from forge.server.engine_client import Generation, Prompt
from forge.server.engine_process import ready_message
from tests.waiting import PATIENCE, eventually

SECRET = b"secret"
PROMPT = list(b"Once upon a time there was a fox who lived by the old mill")
PARAMS = SamplingParams(max_tokens=40, temperature=0.9, ignore_eos=True)


class LocalEngine:
    """A replica's engine, until `kill`."""

    def __init__(self, model: str = "hash", raylet: int = 0, **options: Any):
        """raylet: the process that stands for Ray on this node; 0 for this one."""
        self.llm = LLM(model, **{"kv": "prefix", "threads": 1, "check": True, **options})
        self.pause = 0.0
        self._steps_left, self._may_go_on = math.inf, threading.Event()
        self._step = self.llm.engine.step
        self.llm.engine.step = self._slow_step  # type: ignore[method-assign]
        self._control, control = socket.socketpair()
        listening = listen("127.0.0.1")
        self.address: Address = listening.getsockname()[:2]
        self.server = ReplicaEngine(self.llm, control, listening, SECRET, raylet or os.getpid())
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Close all of its connections between two steps, as the end of its process does."""
        self.server._open = False
        self.server._tell(None)
        self._may_go_on.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def lose_actor(self) -> None:
        """End the actor, and not the engine."""
        self._control.close()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def slow_down(self, seconds: float) -> None:
        """Let every step take this much longer."""
        self.pause = seconds

    def hold_after(self, steps: int) -> None:
        """Let it make so many more steps and stand still in the next, until `go_on` or `kill`."""
        self._steps_left = steps
        self._may_go_on.clear()

    def go_on(self) -> None:
        self._steps_left = math.inf
        self._may_go_on.set()

    @property
    def is_held(self) -> bool:
        return self._steps_left < 0 and not self._may_go_on.is_set()

    def _slow_step(self) -> Any:
        self._steps_left -= 1
        if self._steps_left < 0:
            self._may_go_on.wait()
        if self.pause:
            threading.Event().wait(self.pause)
        return self._step()

    def break_steps(self) -> None:
        """Let every step raise from now on."""

        def broken() -> Any:
            self.llm.engine._plan = None
            raise RuntimeError("a broken kernel")

        self.llm.engine.step = broken  # type: ignore[method-assign]

    def break_loop(self) -> None:
        """Let its loop raise outside of a step, which ends its process."""

        def broken() -> None:
            raise RuntimeError("a broken loop")

        self.server._queue_asked = broken  # type: ignore[method-assign]

    @property
    def is_idle(self) -> bool:
        return not self.llm.engine.scheduler.has_unfinished() and not self.llm.engine.cache.stats().used_blocks


@asynccontextmanager
async def front_of(
    *engines: LocalEngine, prefills: tuple[LocalEngine, ...] = (), **options: Any
) -> AsyncIterator[ClusterClient]:
    """A front whose replicas are called a, b, …; those that compute prompts p, q, …. The engines go on after it."""
    ready = ready_message((engines or prefills)[0].llm)
    client = ClusterClient(SECRET, ready, apart=bool(prefills), **options)
    await client.connect()
    for kind, names, found in ((ENGINES, "abcd", engines), (PREFILLS, "pqrs", prefills)):
        for name, engine in zip(names, found, strict=False):
            client.join(name, kind, engine.address)
    try:
        await eventually(lambda: len(client._links) == len(engines) + len(prefills))
        yield client
    finally:
        client.disconnect()


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test, for ten minutes at most."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 600))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def submit(client: ClusterClient, request_id: str, params: SamplingParams, prompt: list[int] = PROMPT) -> Generation:
    generation = stream_of(params, prompt, request_id)
    client.submit(generation)
    return generation


def stream_of(params: SamplingParams, prompt: list[int] = PROMPT, request_id: str = "r") -> Generation:
    return Generation(request_id, [Prompt(prompt)], params, stream=True)


def seed_of(client: ClusterClient, generation: Generation) -> int:
    """The seed that a request was given at its admission."""
    return client._requests[generation.keys[0]].submit.params.seed


async def read(generation: Generation, on_token: Callable[[int], None] = lambda number: None) -> list[tuple]:
    """What a client reads: of each choice its text, tokens, log probabilities and end. on_token: is called with the
    number of tokens so far."""
    found: dict[int, list] = {}
    number = 0
    async for deltas in generation.updates():
        for delta in deltas:
            text, token_ids, logprobs, end = found.get(delta.choice, ("", [], [], None))
            reason = (delta.finish_reason, delta.stop_reason) if delta.finish_reason is not None else end
            assert end is None or delta.finish_reason is None, "it ended twice"
            found[delta.choice] = (text + delta.text, token_ids + delta.token_ids, logprobs + delta.logprobs, reason)
            number += len(delta.token_ids)
        on_token(number)
    return [found[choice] for choice in sorted(found)]


@cache
def _alone() -> LLM:
    return LLM("hash", kv="prefix", threads=1)


def expected(params: SamplingParams, seed: int, prompt: list[int] = PROMPT) -> list[tuple]:
    """The same of one engine alone."""
    (output,) = _alone().generate([prompt], replace(params, seed=seed))
    return [
        (one.text, list(one.token_ids), list(one.logprobs or ()), (one.finish_reason, one.stop_reason))
        for one in output.outputs
    ]
