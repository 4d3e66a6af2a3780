"""What a router knows: the replicas, the work that each has left, and the prefixes that each has cached.

A `Fleet` lives beside the router, in the process that routes. A replica's load is what its engine reported last, plus
the requests that are on the way to it; so several routers in front of the same engines see each other's requests.
Prefixes are what cache events told. Both trail the engine by the time that an update takes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from forge.cluster.events import CacheEvents, Load
from forge.errors import ForgeError
from forge.trace.records import RouteRecord

_LOAD = attrgetter("tokens", "routed_tokens")
INDEX_BYTES = 128 << 20
"""Of a `PrefixMap`, at most."""
FAILURES = 3
"""In a row that open it."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds."""
_ENTRY_BYTES = 320
"""Of one key: its slot in the ordered dictionary after that has grown, the key, and the bits of some 256 replicas."""
_SWEPT = 512
"""Keys from which the bits of replicas that have left are cleared with each batch of events."""


class NoReplica(ForgeError):
    """There is no replica to send a request to."""

    def __init__(self) -> None:
        super().__init__("no replica runs at the moment: try again when one has started")


@dataclass(frozen=True)
class RouteRequest:
    """The facts that a router may know of a request."""

    request_id: str
    keys: tuple[int, ...] = ()
    """The prefix key of each full block of the prompt."""
    num_prompt_tokens: int = 0
    block_size: int = 16
    avoid: frozenset[str] = frozenset()
    """Replicas that have failed at it: another one is chosen, if there is one."""
    version: str | None = None
    """Of the model that has begun it, which no other goes on with; None before its first token."""


@dataclass(eq=False, slots=True)
class Replica:
    """One replica as the router sees it."""

    name: str
    index: int
    """Its bit in `PrefixMap`."""
    requests: int = 0
    """Sequences that its engine reported, and requests on the way to it."""
    tokens: int = 0
    """Its load: `Load.work` of what its engine reported, and of the requests on the way to it."""
    routed_tokens: int = 0
    """Of all requests that it was ever given, by any router. Decides between replicas of equal load."""
    reported: Load = field(default_factory=Load)
    version: str = ""
    """Of its model. Two versions run side by side while a server is updated."""

    def count(self, load: Load, times: int = 1) -> None:
        self.requests += times * load.sequences
        self.tokens += times * load.work
        self.routed_tokens += times * load.given


def least_busy(replicas: Iterable[Replica]) -> Replica:
    """Return the replica with the least load, of equals the one that was given the fewest tokens so far."""
    return min(replicas, key=_LOAD)


class PrefixMap:
    """Maps a prefix key to the replicas that have its block, as one integer with a bit for each.

    Takes `max_bytes` at most: beyond that the keys that were published longest ago are dropped, and their blocks are
    cached without the router's knowledge. When a replica leaves, its bits stay until later events have swept them, a
    few hundred keys at a time; `longest` is asked for replicas that run, so it never sees them.
    """

    def __init__(self, max_bytes: int = INDEX_BYTES) -> None:
        self.holders: OrderedDict[int, int] = OrderedDict()
        """The keys that were published last come last."""
        self.max_keys = max(1, max_bytes // _ENTRY_BYTES)
        self._gone = 0
        """The bits of replicas that have left and are not swept yet."""
        self._unswept = 0
        """Keys at the beginning of `holders`, at most, that may have such a bit."""

    def __len__(self) -> int:
        """Return how many keys it knows."""
        return len(self.holders)

    def publish(self, index: int, keys: Sequence[int]) -> None:
        bit, holders, rest = 1 << index, self.holders, ~self._gone
        for key in keys:
            holders[key] = holders.pop(key, 0) & rest | bit
        while len(holders) > self.max_keys:
            holders.popitem(last=False)
        self._sweep()

    def evict(self, index: int, keys: Sequence[int]) -> None:
        holders, rest = self.holders, ~(self._gone | 1 << index)
        for key in keys:
            left = holders.get(key, 0) & rest
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)
        self._sweep()

    def forget(self, index: int) -> None:
        """Forget the cache of a replica that is gone."""
        self._gone |= 1 << index
        self._unswept = len(self.holders)

    def is_swept(self, index: int) -> bool:
        """Return whether no key has the bit of a replica that has left, so that another replica may have the bit."""
        return not self._gone >> index & 1

    def longest(self, keys: Sequence[int], among: int) -> tuple[int, int]:
        """Return how many blocks of a prompt the best replicas in the mask `among` have, and which replicas those
        are."""
        holders, best, length = self.holders.get, among, 0
        for key in keys:
            held = holders(key, 0) & best
            if not held:
                break
            best, length = held, length + 1
        return length, best if length else 0

    def _sweep(self) -> None:
        if self._gone:
            holders, rest = self.holders, ~self._gone
            for _ in range(min(_SWEPT, self._unswept, len(holders))):
                key, held = holders.popitem(last=False)
                if held & rest:
                    holders[key] = held & rest
            self._unswept -= min(_SWEPT, self._unswept)
            if not self._unswept:
                self._gone = 0


class SentPrompts(PrefixMap):
    """Maps a prefix key to the replicas that a prompt with this block was sent to, among the last `num_blocks` blocks.

    There are two halves: the older one is dropped when the newer one is full, so no block is evicted by itself. In both
    a replica that has a block has all blocks before it, since a prompt is stored whole; so the end of the longest
    prefix is found by halving, and what lies behind it is new to every replica and is stored at once.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self._newer, self._older = dict[int, int](), dict[int, int]()
        self._half = num_blocks // 2
        self._gone_before = 0
        """The bits of replicas that left before the newer half began."""

    def __len__(self) -> int:
        return len(self._newer.keys() | self._older.keys())

    def publish(self, index: int, keys: Sequence[int]) -> None:
        """Note that a prompt is sent to a replica."""
        if len(self._newer) >= self._half:
            self._newer, self._older = {}, self._newer
            self._gone, self._gone_before = 0, self._gone
        bit, newer = 1 << index, self._newer
        held, _ = _longest(keys, bit, newer, {})
        known, _ = _longest(keys, ~0, newer, {})
        for key in keys[held:known]:
            newer[key] = newer.get(key, 0) | bit
        newer.update(dict.fromkeys(keys[known:], bit))

    def forget(self, index: int) -> None:
        self._gone |= 1 << index

    def is_swept(self, index: int) -> bool:
        return not (self._gone | self._gone_before) >> index & 1

    def longest(self, keys: Sequence[int], among: int) -> tuple[int, int]:
        return _longest(keys, among, self._newer, self._older)


def _longest(keys: Sequence[int], among: int, newer: dict[int, int], older: dict[int, int]) -> tuple[int, int]:
    """Return what `PrefixMap.longest` does, of two maps whose replicas have every block before one that they have."""
    length, end, best = 0, len(keys), 0
    while length < end:
        middle = (length + end + 1) // 2
        key = keys[middle - 1]
        if held := (newer.get(key, 0) | older.get(key, 0)) & among:
            length, best = middle, held
        else:
            end = middle - 1
    return length, best


@dataclass
class Fleet:
    """The replicas by name."""

    replicas: dict[str, Replica] = field(default_factory=dict)
    prefixes: PrefixMap = field(default_factory=PrefixMap)
    _by_index: list[Replica | None] = field(default_factory=list)
    _suspended: set[str] = field(default_factory=set)
    """Replicas that no request goes to while there is another."""
    _healthy: dict[str | None, tuple[list[Replica], int]] = field(default_factory=dict)
    """From a version, or None for any, to the replicas of it that are not suspended and their bits. Empty after a
    change, until they are asked for."""
    _on_the_way: dict[str, tuple[Replica, Load]] = field(default_factory=dict)
    """From the id of a request that no report counts yet to its replica and the load that it counts for."""

    def join(self, name: str, version: str = "") -> Replica:
        """A replica has started, with an empty cache."""
        if name not in self.replicas:
            index = self._free_index()
            replica = self.replicas[name] = Replica(name, index, version=version)
            self._by_index[index : index + 1] = [replica]
            self._healthy.clear()
        return self.replicas[name]

    def _free_index(self) -> int:
        for index, replica in enumerate(self._by_index):
            if replica is None and self.prefixes.is_swept(index):
                return index
        return len(self._by_index)

    def leave(self, name: str) -> None:
        """Remove a replica that has ended or died. Its requests count for none until they are routed again."""
        replica = self.replicas.pop(name, None)
        self._suspended.discard(name)
        if replica is not None:
            self._by_index[replica.index] = None
            self.prefixes.forget(replica.index)
            self._healthy.clear()

    def suspend(self, name: str) -> None:
        """Send requests to other replicas for now, if there are any."""
        self._suspended.add(name)
        self._healthy.clear()

    def resume(self, name: str) -> None:
        self._suspended.discard(name)
        self._healthy.clear()

    @property
    def num_healthy(self) -> int:
        """The number of replicas that are not suspended."""
        return len(self.replicas) - len(self._suspended & self.replicas.keys())

    def candidates(self, avoid: frozenset[str] = frozenset(), version: str | None = None) -> list[Replica]:
        """The replicas to choose among, of one version if that is given: those that are neither suspended nor in
        `avoid`, if there are any; else those that are not suspended, else all. Raises `NoReplica` where none runs."""
        chosen, _ = self._usable(version)
        if not chosen:
            raise NoReplica
        if self.replicas.keys() & avoid:  # an engine that has died is no longer among them
            return [replica for replica in chosen if replica.name not in avoid] or chosen
        return chosen

    def candidates_mask(self, avoid: frozenset[str] = frozenset(), version: str | None = None) -> int:
        """Return the bits of the `candidates`."""
        _, usable = self._usable(version)
        mask = usable
        for name in self.replicas.keys() & avoid:
            mask &= ~(1 << self.replicas[name].index)
        return mask or usable

    def _usable(self, version: str | None) -> tuple[list[Replica], int]:
        """Return the replicas of a version that are not suspended, or all of it if each is, and their bits."""
        if version not in self._healthy:
            among = [replica for replica in self.replicas.values() if version in (None, replica.version)]
            chosen = [replica for replica in among if replica.name not in self._suspended] or among
            self._healthy[version] = chosen, sum([1 << replica.index for replica in chosen])
        return self._healthy[version]

    def replicas_of(self, mask: int, start: int) -> Iterator[Replica]:
        """Return the replicas of a mask, those with the bit `start` and above first."""
        above = mask >> start << start
        for part in (above, mask ^ above):
            while part:
                replica = self._by_index[(part & -part).bit_length() - 1]
                if replica is not None:
                    yield replica
                part &= part - 1

    def apply(self, name: str, events: CacheEvents) -> None:
        """Apply a replica's cache events. Those of a replica that has left mean nothing."""
        replica = self.replicas.get(name)
        if replica is not None:
            if events.published:
                self.prefixes.publish(replica.index, events.published)
            if events.evicted:
                self.prefixes.evict(replica.index, events.evicted)

    def report(self, name: str, load: Load) -> None:
        """Store a replica's load, which counts the requests that its engine has accepted."""
        replica = self.replicas.get(name)
        if replica is not None:
            replica.count(replica.reported, -1)
            replica.count(load)
            replica.reported = load

    def begin(self, request: RouteRequest, decision: RouteRecord) -> None:
        """Count a request at the replica that was chosen; one that is routed again moves."""
        self.end(request.request_id)
        replica = self.replicas[decision.replica]
        tokens = max(0, request.num_prompt_tokens - decision.cached_tokens)
        self._on_the_way[request.request_id] = replica, load = replica, Load(tokens, 1, tokens)
        replica.count(load)

    def end(self, request_id: str) -> None:
        """Stop counting a request: its engine's reports count it from now on, or it has ended before. Does nothing for
        another request."""
        if request_id in self._on_the_way:
            replica, load = self._on_the_way.pop(request_id)
            replica.count(load, -1)


@dataclass
class Breaker:
    """A circuit breaker: closed while a replica works, open after failures in a row. Then it gets no requests for a
    while, and a trial; the pause doubles with each trial that fails (Nygard 2007, *Release It!*). It knows no clock:
    its caller waits."""

    failures: int = 0
    """In a row."""
    pause: float = 0.0
    """Seconds of the current pause; 0 while it is closed."""

    def succeeded(self) -> None:
        """Note that the replica did its work."""
        self.failures, self.pause = 0, 0.0

    def failed(self, is_gone: bool = False) -> float | None:
        """Note a failure; return the seconds for which the replica gets no requests, or None if it goes on. is_gone: it
        cannot be reached, which opens the breaker at once."""
        self.failures += 1
        if self.failures < FAILURES and not is_gone and not self.pause:
            return None
        self.pause = min(LONGEST_PAUSE, 2 * self.pause or FIRST_PAUSE)
        return self.pause
