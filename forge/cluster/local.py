"""Several engines in one process, taking turns: the routers on real engines, for counts and tokens, not for time.

What is counted is exact and the same in every run. Engines that run at once, and die, are Ray Serve's (`launch`).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forge.cache.prefix import PrefixKvCache
from forge.cache.prefix_index import PrefixIndex
from forge.cluster.events import EventLog, LoadMeter
from forge.cluster.fleet import Fleet, RouteRequest
from forge.cluster.routers import Router, new_router
from forge.engine.engine import Engine
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.errors import UsageError
from forge.trace.records import RouteRecord, StepRecord


@dataclass
class Talk:
    """A conversation whose user turns are all known beforehand."""

    system: list[int]
    turns: list[list[int]]
    history: list[int] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return len(self.answers) == len(self.turns)

    def prompt(self) -> list[int]:
        """Return the next request: everything said so far, and the next turn."""
        return [*(self.history or self.system), *self.turns[len(self.answers)]]


@dataclass(frozen=True)
class Routed:
    """A request and the engine that it went to."""

    decision: RouteRecord
    prompt_tokens: int
    cached_tokens: int
    """Found in the cache of the engine that it went to."""


@dataclass
class LocalRun:
    """The results of all requests under one router."""

    router: str
    replicas: int
    routed: list[Routed] = field(default_factory=list)
    """In the order in which they were routed."""
    computed_by_replica: list[int] = field(default_factory=list)
    answers: list[list[tuple[int, ...]]] = field(default_factory=list)
    """Of each conversation, its answers."""

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.routed)

    @property
    def computed_tokens(self) -> int:
        """The number of prompt tokens that no cache had."""
        return sum(self.computed_by_replica)

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed_tokens / self.prompt_tokens

    @property
    def requests_by_replica(self) -> list[int]:
        names = [request.decision.replica for request in self.routed]
        return [names.count(str(number)) for number in range(self.replicas)]

    @property
    def balance(self) -> float:
        """The prompt and output tokens that the busiest replica computed, over the mean."""
        return max(self.computed_by_replica) * self.replicas / max(1, self.computed_tokens)

    @property
    def request_balance(self) -> float:
        """The requests of the busiest replica over the mean."""
        return max(self.requests_by_replica) * self.replicas / max(1, len(self.routed))


class LocalCluster:
    """Engines behind a router. Each tick every engine that has work takes one step."""

    def __init__(self, engines: Sequence[Engine], router: str | Callable[[Fleet], Router]):
        """Give each engine an empty prefix cache. Raises `UsageError` for engines with another kind of cache."""
        self.engines = {str(number): engine for number, engine in enumerate(engines)}
        self.fleet = Fleet()
        self.router = router(self.fleet) if callable(router) else new_router(router, self.fleet)
        self.logs = {name: EventLog() for name in self.engines}
        self.meters = {name: LoadMeter(engine.scheduler) for name, engine in self.engines.items()}
        for name, engine in self.engines.items():
            if not isinstance(engine.cache, PrefixKvCache):
                raise UsageError("routing by prefix needs engines with --kv prefix")
            self.fleet.join(name)
            self.logs[name].observe(engine.cache.index)
        self.on_step: Callable[[str, StepRecord], None] = lambda name, record: None
        """Called with an engine's name and each of its steps."""
        self._index = PrefixIndex()
        self._where: dict[str, str] = {}
        """From the id of a request that runs to its engine."""

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams) -> RouteRecord:
        """Route a request and queue it at its engine."""
        size = next(iter(self.engines.values())).cache.block_size
        keys = self._index.keys(prompt[:-1], size)
        decision = self.router.route(RouteRequest(request_id, keys, len(prompt), size))
        name = self._where[request_id] = decision.replica
        (seq_id, *_) = self.engines[name].add_request(request_id, prompt, params)
        self.meters[name].take(seq_id, decision.cached_tokens)
        self.fleet.end(request_id)
        self.fleet.report(name, self.meters[name].load())
        return decision

    def tick(self) -> list[str]:
        """Run one step of each engine that has work; return the ids of the requests that ended in it."""
        for name, engine in self.engines.items():
            if engine.has_unfinished():
                self.on_step(name, engine.step())
                self.fleet.report(name, self.meters[name].load())
                if self.router.needs_events:
                    self.fleet.apply(name, self.logs[name].take())
        return [request for request, name in self._where.items() if not self.engines[name].is_unfinished(request)]

    def take_output(self, request_id: str) -> RequestOutput:
        """Return the output of a request that has ended; its engine forgets it."""
        engine = self.engines[self._where.pop(request_id)]
        output = engine.output(request_id)
        engine.forget(request_id)
        return output


def run_talks(
    engines: Sequence[Engine],
    router: str | Callable[[Fleet], Router],
    talks: Sequence[Talk],
    params: SamplingParams,
    clients: int,
) -> LocalRun:
    """Run all turns of all conversations, `clients` of them at once, the next one drawn from those that wait for
    theirs."""
    cluster = LocalCluster(engines, router)
    run = LocalRun(cluster.router.name, len(engines), computed_by_replica=[0] * len(engines))
    random_, running, number = random.Random(0), dict[str, tuple[Talk, RouteRecord]](), 0
    while True:
        busy = [talk for talk, _ in running.values()]
        waiting = [talk for talk in talks if not talk.has_ended and not any(talk is active for active in busy)]
        if not waiting and not running:
            break
        while waiting and len(running) < clients:
            talk = waiting.pop(random_.randrange(len(waiting)))
            running[str(number)] = talk, cluster.submit(str(number), talk.prompt(), params)
            number += 1
        for request_id in cluster.tick():
            talk, decision = running.pop(request_id)
            output = cluster.take_output(request_id)
            (answer,) = output.outputs
            cached = output.metrics.tokens_cached
            prompt = len(output.prompt_token_ids)
            run.routed.append(Routed(decision, prompt, cached))
            run.computed_by_replica[int(decision.replica)] += prompt - cached
            talk.history = [*output.prompt_token_ids, *answer.token_ids]
            talk.answers.append(answer.token_ids)
    run.answers = [list(talk.answers) for talk in talks]
    return run
