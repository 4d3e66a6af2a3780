"""What an engine tells its routers: which blocks its prefix cache has, and the work that it has left.

The cache itself tells which blocks; nothing is inferred. A block is named by the engine's own prefix
key, the chained hash of all tokens up to its end. An `EventLog` observes a replica's `PrefixIndex`; its batches go to
the router's `Fleet`, which applies them in order. (vLLM publishes the same facts as `BlockStored` and `BlockRemoved`
over ZeroMQ; llm-d's and Dynamo's routers read those.)
"""

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from forge.cache.prefix_index import IndexSubscriber, PrefixIndex

if TYPE_CHECKING:
    from forge.engine.scheduler import Scheduler

SEQUENCE_TOKENS = 16
"""Prompt tokens that a running sequence counts for: a prompt of some hundred tokens, computed in a few chunks, shares
each of those steps with one row of every sequence."""


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


class EventLog(IndexSubscriber):
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


class Load(NamedTuple):
    """The work that an engine has left, as the engine counts it."""

    tokens: int = 0
    """Prompt tokens that are not yet computed, without those that are cached."""
    sequences: int = 0
    """Sequences that run or wait."""
    given: int = 0
    """Prompt tokens of all requests that it was ever given, without those that were cached."""

    @property
    def work(self) -> int:
        """Both numbers as one, in prompt tokens. How long answers may become is not in it: no client knows."""
        return self.tokens + SEQUENCE_TOKENS * self.sequences


class LoadMeter:
    """Counts the prompt tokens that a scheduler's sequences have yet to compute.

    Of a sequence that runs the cache knows how far it is. What a waiting one will find in the cache is known when it is
    admitted; until then it is what the router expected.
    """

    def __init__(self, scheduler: "Scheduler"):
        self._scheduler = scheduler
        self._expected: dict[int, int] = {}
        """Of waiting sequences, the tokens that their router expects to be cached."""
        self._given = 0

    def take(self, seq_id: int, cached_tokens: int) -> None:
        """Count a request that has been queued. cached_tokens: as its router expects."""
        self._given += max(0, len(self._scheduler.queue.sequences[seq_id].token_ids) - cached_tokens)
        if cached_tokens:
            self._expected[seq_id] = cached_tokens

    def load(self) -> Load:
        """The load between two steps, in time proportional to the sequences."""
        scheduler, tokens = self._scheduler, 0
        sequences, computed_length = len(scheduler.running), scheduler.cache.computed_length
        for seq_id, sequence in scheduler.running.items():
            left = len(sequence.token_ids) - computed_length(seq_id)
            tokens += left if left > 1 else 0
            sequences += len(sequence.waiting_samples)
        if not scheduler.queue.sequences:
            self._expected.clear()
            return Load(tokens, sequences, self._given)
        expected, self._expected = self._expected, {}
        for seq_id, sequence in scheduler.queue.sequences.items():
            if (cached := expected.get(seq_id, 0)) and not sequence.times_preempted:
                self._expected[seq_id] = cached
                tokens -= min(cached, len(sequence.token_ids) - 1)
            tokens += len(sequence.token_ids)
            sequences += 1 + len(sequence.waiting_samples)
        return Load(tokens, sequences, self._given)
