"""What a router knows: the replicas, the requests that each has, and the prefixes that each has cached.

A `Fleet` lives beside the router, in the process that routes. Loads are exact: a request counts from its decision to
its end. Prefixes are what cache events told, so they trail a replica's cache by the time an event takes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from forge.cluster.events import CacheEvents
from forge.errors import ForgeError
from forge.trace.records import RouteRecord

_ROUTED = attrgetter("routed_tokens")


class NoReplica(ForgeError):
    """There is no replica to send a request to."""

    def __init__(self) -> None:
        super().__init__("no replica runs at the moment: try again when one has started")


@dataclass(frozen=True)
class RouteRequest:
    """What a router may know of a request."""

    request_id: str
    keys: tuple[int, ...] = ()
    """The prefix key of each full block of the prompt."""
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    block_size: int = 16
    target: str | None = None
    """The one replica that this is for; None for any."""
    avoid: str | None = None
    """A replica that has failed at it: another one is tried, if there is one."""

    @property
    def num_tokens(self) -> int:
        """What it may make a replica compute, if nothing of its prompt is cached."""
        return self.num_prompt_tokens + self.max_tokens


@dataclass(eq=False, slots=True)
class Replica:
    """One replica as the router sees it."""

    name: str
    index: int
    """Its bit in `PrefixMap`."""
    requests: int = 0
    """Outstanding."""
    tokens: int = 0
    """Outstanding: of each request its uncached prompt tokens and the tokens that it may generate."""
    routed_tokens: int = 0
    """Of all requests that it was ever given. Decides between replicas with as many tokens outstanding."""


def least_busy(replicas: Sequence[Replica]) -> Replica:
    """The one with the fewest tokens outstanding, of equals the one that was given the fewest so far. Written for
    hundreds of replicas and thousands of decisions a second."""
    fewest = min([one.tokens for one in replicas])
    equals = [one for one in replicas if one.tokens == fewest]
    return min(equals, key=_ROUTED) if len(equals) > 1 else equals[0]


class PrefixMap:
    """From a prefix key to the replicas that have its block, as one integer with a bit for each."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}

    def publish(self, index: int, keys: Sequence[int]) -> None:
        bit, holders = 1 << index, self.holders
        for key in keys:
            holders[key] = holders.get(key, 0) | bit

    def evict(self, index: int, keys: Sequence[int]) -> None:
        bit, holders = 1 << index, self.holders
        for key in keys:
            left = holders.get(key, 0) & ~bit
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def forget(self, index: int) -> None:
        """A replica is gone, and its cache with it."""
        self.evict(index, [key for key, held in self.holders.items() if held >> index & 1])

    def longest(self, keys: Sequence[int], among: int) -> tuple[int, int]:
        """Of the replicas in the mask `among`: how many blocks of a prompt the best of them have, and which those
        are."""
        holders, best, length = self.holders.get, among, 0
        for key in keys:
            held = holders(key, 0) & best
            if not held:
                break
            best, length = held, length + 1
        return length, best if length else 0


@dataclass
class Fleet:
    """The replicas, by name."""

    replicas: dict[str, Replica] = field(default_factory=dict)
    prefixes: PrefixMap = field(default_factory=PrefixMap)
    mask: int = 0
    """The bits of all replicas."""
    _by_index: list[Replica | None] = field(default_factory=list)
    _outstanding: dict[str, tuple[Replica, int]] = field(default_factory=dict)
    """From a request's id to where it is and the tokens that it counts for."""

    def join(self, name: str) -> Replica:
        """A replica has started, with an empty cache."""
        if name not in self.replicas:
            index = self._by_index.index(None) if None in self._by_index else len(self._by_index)
            self._by_index[index : index + 1] = [Replica(name, index)]
            self.mask |= 1 << index
            self.replicas[name] = self._by_index[index]  # type: ignore[assignment]
        return self.replicas[name]

    def leave(self, name: str) -> None:
        """A replica has ended or died. Its requests count for none until they are routed again."""
        replica = self.replicas.pop(name, None)
        if replica is not None:
            self._by_index[replica.index] = None
            self.mask &= ~(1 << replica.index)
            self.prefixes.forget(replica.index)

    def set_to(self, names: Sequence[str]) -> None:
        """These replicas run, and no others."""
        for name in self.replicas.keys() - set(names):
            self.leave(name)
        for name in names:
            self.join(name)

    def candidates(self, names: Sequence[str] | None = None) -> list[Replica]:
        """The replicas to choose among: those of `names` that run. Raises `NoReplica` if there is none."""
        found = list(self.replicas.values())
        if names is not None:
            found = [self.replicas[name] for name in names if name in self.replicas]
        if not found:
            raise NoReplica
        return found

    def holders(self, mask: int) -> Iterator[Replica]:
        """The replicas of a mask."""
        while mask:
            replica = self._by_index[(mask & -mask).bit_length() - 1]
            if replica is not None:
                yield replica
            mask &= mask - 1

    def apply(self, name: str, events: CacheEvents) -> None:
        """Take in what a replica's cache has told. Of one that has left it means nothing."""
        replica = self.replicas.get(name)
        if replica is not None:
            self.prefixes.publish(replica.index, events.published)
            self.prefixes.evict(replica.index, events.evicted)

    def begin(self, request: RouteRequest, decision: RouteRecord) -> None:
        """Count a request at the replica that was chosen; one that is routed again moves."""
        self.end(request.request_id)
        replica = self.replicas[decision.replica]
        tokens = max(0, request.num_tokens - decision.cached_tokens)
        replica.requests += 1
        replica.tokens += tokens
        replica.routed_tokens += tokens
        self._outstanding[request.request_id] = replica, tokens

    def end(self, request_id: str) -> None:
        """A request has ended, however it did. Does nothing for one that is not outstanding."""
        replica, tokens = self._outstanding.pop(request_id, (None, 0))
        if replica is not None:
            replica.requests -= 1
            replica.tokens -= tokens
