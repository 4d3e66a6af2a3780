"""Exercise 11: a router that knows prefixes.

Read chapter 12 first (forge cluster). Several engines run, each with a cache of its own. For every request a router
chooses one of them. The one that has the longest beginning of the prompt computes least; the one with the least to do
begins soonest.

    prompt, as keys of its blocks    [k1, k2, k3, k4]
    engine a has k1 k2 k3            load 700
    engine b has k1                  load 100        which of them, if the threshold is 512?

Fill in the two functions. Then:

    forge build check 11      does it keep every request once, and compute little?
    forge build run 11        two engines, with your router before them
"""

from collections.abc import Sequence

from forge.cluster.fleet import Replica, RouteRequest
from forge.cluster.routers import Router
from forge.trace.records import RouteRecord


class MyRouter(Router):
    """The replica with the longest cached prefix, unless it is busier than the least busy by more than a threshold."""

    name = "mine"
    needs_events = True
    threshold = 512

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> RouteRecord:
        """Choose one of the candidates, of which there is at least one. Changes nothing: the request is counted
        afterwards.

        Of a replica you need `tokens` (outstanding), `routed_tokens` (ever given to it) and `name`. The least busy one
        has the fewest tokens; of several the one with the fewest routed tokens; of several of these take any. Where no
        candidate has the prompt's first block, take the least busy one. Of several holders of the longest prefix, take
        the least busy one, unless it has more tokens than the least busy candidate by more than `self.threshold`.

        Return `self.decision(request, chosen, why, num_blocks)`, with the number of blocks that the chosen replica has,
        and as `why` "prefix", "no_prefix" or "holder_busy".
        """
        raise NotImplementedError("choose")

    def num_blocks(self, replica: Replica, request: RouteRequest) -> int:
        """Return how many of the prompt's first blocks this replica has.

        `request.keys` names the blocks in order, and `self.has(replica, key)` says whether it has one. A block is worth
        nothing without those before it.
        """
        raise NotImplementedError("num_blocks")

    # Given

    def has(self, replica: Replica, key: int) -> bool:
        """Return whether a replica has a block, as its cache's events have told."""
        return bool(self.fleet.prefixes.holders.get(key, 0) >> replica.index & 1)

    def decision(self, request: RouteRequest, chosen: Replica, why: str, num_blocks: int) -> RouteRecord:
        least = min(replica.tokens for replica in self.fleet.replicas.values())
        cached = num_blocks * request.block_size
        number = len(self.fleet.replicas)
        return RouteRecord(request.request_id, self.name, chosen.name, why, number, chosen.tokens, least, cached)


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
