"""Exercise 11, solved."""

from collections.abc import Sequence

from forge.cluster.fleet import Replica, RouteRequest
from forge.cluster.routers import Router
from forge.trace.records import RouteRecord


class MyRouter(Router):
    name = "mine"
    needs_events = True
    threshold = 512

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> RouteRecord:
        least = min(candidates, key=lambda one: (one.tokens, one.routed_tokens))
        blocks = {one.name: self.num_blocks(one, request) for one in candidates}
        longest = max(blocks.values())
        if longest == 0:
            return self.decision(request, least, "no_prefix", 0)
        holders = [one for one in candidates if blocks[one.name] == longest]
        holder = min(holders, key=lambda one: (one.tokens, one.routed_tokens))
        if holder.tokens - least.tokens > self.threshold:
            return self.decision(request, least, "holder_busy", blocks[least.name])
        return self.decision(request, holder, "prefix", longest)

    def num_blocks(self, replica: Replica, request: RouteRequest) -> int:
        number = 0
        for key in request.keys:
            if not self.has(replica, key):
                break
            number += 1
        return number

    def has(self, replica: Replica, key: int) -> bool:
        return bool(self.fleet.prefixes.holders.get(key, 0) >> replica.index & 1)

    def decision(self, request: RouteRequest, chosen: Replica, why: str, num_blocks: int) -> RouteRecord:
        least = min(replica.tokens for replica in self.fleet.replicas.values())
        cached = num_blocks * request.block_size
        number = len(self.fleet.replicas)
        return RouteRecord(request.request_id, self.name, chosen.name, why, number, chosen.tokens, least, cached)
