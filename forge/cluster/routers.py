"""Routers: each looks at a `Fleet` and chooses a replica for one request.

A router changes nothing but its own turn or draw; `Fleet.begin` counts the request afterwards. The same classes run
in a server's front, in the simulation and in the experiment. To add one, write a class and enter it in
`ROUTERS`. Loads are those of all replicas, or of `COMPARED` drawn ones where there are more.

| | looks at | good at | bad at |
| --- | --- | --- | --- |
| `round-robin` | nothing | equal requests | requests of different length; a conversation visits every cache |
| `p2c` | requests of two random replicas | many routers at once: each needs two numbers | the same; as above |
| `least-tokens` | loads | requests of different length | as above |
| `prefix` | cache events, loads | conversations, shared system prompts | prompts that share nothing |
| `prefix-estimate` | what it routed before | the same, without events | caches that evict |
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import islice

from forge.cluster.fleet import Fleet, Replica, RouteRequest, SentPrompts, least_busy
from forge.errors import UsageError
from forge.trace.records import RouteRecord

DEFAULT_THRESHOLD = 512
"""Prompt tokens by which the holder of a prefix may be busier than the least busy replica."""
ESTIMATED_BLOCKS = 1 << 16
"""Blocks that an estimate remembers, at most; at least half as many."""
COMPARED = 16
"""Replicas whose loads one decision compares, at most: of more, so many are drawn."""


class Router(ABC):
    """Chooses replicas. Promises to choose one of the candidates, and to count nothing itself."""

    name: str
    needs_events = False
    """Whether it reads cache events."""

    def __init__(self, fleet: Fleet):
        self.fleet, self.random = fleet, random.Random(0)

    @abstractmethod
    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> RouteRecord:
        """One of the candidates, which are never none."""

    def compared(self, candidates: Sequence[Replica]) -> Sequence[Replica]:
        """Return the candidates, or `COMPARED` of many. A decision then takes as long with a thousand replicas as with
        a few, and fronts whose loads are a little old do not all choose the same replica."""
        number, draw = len(candidates), self.random.random
        if number <= COMPARED:
            return candidates
        return [candidates[int(draw() * number)] for _ in range(COMPARED)]

    def route(self, request: RouteRequest) -> RouteRecord:
        """Choose, and count the request there. Raises `NoReplica` if none runs."""
        candidates = self.fleet.candidates(request.avoid, request.version)
        self.fleet.end(request.request_id)
        decision = self.choose(request, candidates)
        self.fleet.begin(request, decision)
        return decision


class RoundRobin(Router):
    """Sends requests to each replica in turn."""

    name = "round-robin"
    _turn = 0

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> RouteRecord:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        least = min([replica.requests for replica in self.compared(candidates)])
        return RouteRecord(request.request_id, self.name, chosen.name, "turn", len(candidates), chosen.requests, least)


class PowerOfTwoChoices(Router):
    """Of two random replicas the one with fewer requests (Mitzenmacher 2001): nearly as even as asking all of them."""

    name = "p2c"

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> RouteRecord:
        two = self.random.sample(candidates, min(2, len(candidates)))
        chosen = min(two, key=lambda replica: replica.requests)
        return RouteRecord(
            request.request_id, self.name, chosen.name, "fewer_requests", len(two), chosen.requests, chosen.requests
        )


class LeastOutstandingTokens(Router):
    """The replica with the least load: a prompt of 4,000 tokens is not one of 40."""

    name = "least-tokens"

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> RouteRecord:
        chosen = least_busy(self.compared(candidates))
        return RouteRecord(
            request.request_id, self.name, chosen.name, "fewer_tokens", len(candidates), chosen.tokens, chosen.tokens
        )


class PrefixRouter(Router):
    """The replica with the longest cached prefix, unless it is busier than the least busy one by more than a threshold:
    then the least busy one, whose cache has the prefix from then on too."""

    name = "prefix"
    needs_events = True

    def __init__(self, fleet: Fleet, threshold: int = DEFAULT_THRESHOLD):
        super().__init__(fleet)
        self.threshold = threshold

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> RouteRecord:
        fleet, least = self.fleet, least_busy(self.compared(candidates))
        usable = fleet.candidates_mask(request.avoid, request.version)
        blocks, mask = fleet.prefixes.longest(request.keys, usable)
        if not blocks:
            return RouteRecord(
                request.request_id, self.name, least.name, "no_prefix", len(candidates), least.tokens, least.tokens
            )
        start = self.random.randrange(mask.bit_length())
        holder = least_busy(islice(fleet.replicas_of(mask, start), COMPARED))
        if holder.tokens - least.tokens <= self.threshold:
            chosen, why, cached_blocks = holder, "prefix", blocks
        else:
            chosen, why = least, "holder_busy"
            cached_blocks, _ = fleet.prefixes.longest(request.keys, 1 << least.index)
        return RouteRecord(
            request.request_id,
            self.name,
            chosen.name,
            why,
            len(candidates),
            chosen.tokens,
            least.tokens,
            max(0, min(cached_blocks * request.block_size, request.num_prompt_tokens - 1)),
            holder.name,
            blocks * request.block_size,
            holder.tokens,
        )


class EstimatedPrefixRouter(PrefixRouter):
    """The same without events: a replica is believed to have every prompt that was sent to it, until some `num_blocks`
    newer blocks were sent anywhere. (SGLang's router and Ray's `PrefixCacheAffinityRouter` estimate so, over trees of
    text.)"""

    name = "prefix-estimate"
    needs_events = False

    def __init__(self, fleet: Fleet, threshold: int = DEFAULT_THRESHOLD, num_blocks: int = ESTIMATED_BLOCKS):
        super().__init__(fleet, threshold)
        fleet.prefixes = SentPrompts(num_blocks)

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> RouteRecord:
        decision = super().choose(request, candidates)
        self.fleet.prefixes.publish(self.fleet.replicas[decision.replica].index, request.keys)
        return decision


ROUTERS: dict[str, Callable[[Fleet], Router]] = {
    router.name: router
    for router in (RoundRobin, PowerOfTwoChoices, LeastOutstandingTokens, PrefixRouter, EstimatedPrefixRouter)
}


def new_router(name: str, fleet: Fleet, threshold: int = DEFAULT_THRESHOLD, seed: int = 0) -> Router:
    """The router that `name` means. threshold: of those that know prefixes. seed: of its draws, another one for each
    front. Raises `UsageError` listing those there are."""
    if name not in ROUTERS:
        raise UsageError(f"unknown router {name!r}; there are {', '.join(ROUTERS)}")
    router = ROUTERS[name](fleet)
    router.random.seed(seed)
    if isinstance(router, PrefixRouter):
        router.threshold = threshold
    return router
