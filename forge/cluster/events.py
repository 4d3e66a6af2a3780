"""Cache events: which blocks a replica's prefix cache has, told by the cache and not inferred from what was routed.

A block is named by the engine's own prefix key, the chained hash of all tokens up to its end. An `EventLog` observes a
replica's `PrefixIndex`; its batches go to the router's `Fleet`, which applies them in order. (vLLM publishes the same
facts as `BlockStored` and `BlockRemoved` over ZeroMQ; llm-d's and Dynamo's routers read those.)
"""

from dataclasses import dataclass
from threading import Lock

from forge.cache.prefix_index import PrefixIndex


@dataclass(frozen=True)
class CacheEvents:
    """The changes of one replica's cache since its last batch."""

    published: tuple[int, ...] = ()
    """Keys of contents that the cache has now and did not have before."""
    evicted: tuple[int, ...] = ()
    """Keys of contents that it no longer has."""

    def __bool__(self) -> bool:
        return bool(self.published or self.evicted)

    def then(self, later: "CacheEvents") -> "CacheEvents":
        """Join two batches into one."""
        if not self or not later:
            return later or self
        published, evicted = dict.fromkeys(self.published), dict.fromkeys(self.evicted)
        for now, before, keys in ((published, evicted, later.published), (evicted, published, later.evicted)):
            now.update(dict.fromkeys(keys))
            for key in keys:
                before.pop(key, None)
        return CacheEvents(tuple(published), tuple(evicted))


NO_EVENTS = CacheEvents()


class EventLog:
    """Collects the net changes of one prefix index. The engine's thread writes, another thread may take."""

    def __init__(self) -> None:
        self._changes: dict[int, bool] = {}
        """From a key to whether the cache has it now, for keys that have changed since the last `take`."""
        self._lock = Lock()

    def observe(self, index: PrefixIndex) -> None:
        index.subscriber = self

    def published(self, key: int) -> None:
        self._note(key, True)

    def evicted(self, key: int) -> None:
        self._note(key, False)

    def take(self) -> CacheEvents:
        """Return the changes since the last call. A content that came and went in between is in neither list."""
        with self._lock:
            changes, self._changes = self._changes, {}
        published = tuple([key for key, held in changes.items() if held])
        return CacheEvents(published, tuple([key for key, held in changes.items() if not held]))

    def _note(self, key: int, held: bool) -> None:
        with self._lock:
            if self._changes.get(key) is (not held):
                del self._changes[key]
            else:
                self._changes[key] = held
