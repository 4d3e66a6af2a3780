"""Where every sequence is: in exactly one container, which is all that there is to its state.

`waiting`, `running`, `swapped` (its blocks are in the host's pool), the `forks` of the sequence whose prompt it shares,
or (ended, but with its cache left for a continuation) `kept`. A kept cache is a convenience: the oldest is given up
where a sequence would otherwise find no room.

An exception may come between any two lines here (Ctrl-C). A sequence's tokens are the truth and its cache can always be
computed again; so `recover` starts from the tokens alone, whatever state the rest was left in.
"""

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Items

from forge.cache.host_pool import HostPool
from forge.cache.kv_cache import CacheStats, KvCache
from forge.engine.policies import SchedulerConfig
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Outcome, flat
from forge.trace.records import FinishReason


class Containers:
    def __init__(self, cache: KvCache, config: SchedulerConfig):
        self.cache = cache
        self.config = config
        self.host = HostPool(config.num_host_blocks)
        self.waiting: list[Sequence] = []
        """In the order in which they will be admitted."""
        self.running: dict[int, Sequence] = {}
        """In the order of their admission."""
        self.swapped: dict[int, Sequence] = {}
        self.kept: dict[int, Sequence] = {}
        self.num_finished = 0
        self.stats: CacheStats = cache.stats()
        """The cache as the last step left it, with the sequences that ended in it still there."""
        self.order = config.admission_order

    def enqueue(self, sequence: Sequence) -> None:
        """To its place in the queue: one that ran before came before those that never did."""
        insort(self.waiting, sequence, key=self.order)

    def unfinished(self) -> Iterator[Sequence]:
        """Every sequence that has not ended, whichever container holds it."""
        for sequence in [*self.waiting, *self.running.values(), *self.swapped.values()]:
            yield sequence
            yield from sequence.forks

    def find(self, seq_id: int) -> Sequence | None:
        """A sequence that has not ended."""
        if seq_id in self.running:
            return self.running[seq_id]
        return next((sequence for sequence in self.unfinished() if sequence.seq_id == seq_id), None)

    def retire(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """The one way out for every sequence, whatever ended it."""
        sequence.stop_reason = stop_reason
        sequence.finish_reason = reason
        seq_id = sequence.seq_id
        self.num_finished += 1
        if sequence.forks:  # it ended before its prompt was computed: the next sample takes its place
            heir = sequence.forks[0]
            heir.forks = sequence.forks[1:]
            self.enqueue(heir)
            sequence.forks = []
        if seq_id in self.running:
            if sequence.keep_cache:
                self.cache.truncate(seq_id, self.cache.computed_length(seq_id))
                self.kept[seq_id] = sequence
            else:
                self.cache.remove(seq_id)
            del self.running[seq_id]
        elif self.swapped.pop(seq_id, None) is None:
            self.waiting.remove(sequence)
        self.host.drop(seq_id)

    def abort(self, seq_id: int, reason: FinishReason = "abort") -> Sequence | None:
        """End a sequence between steps, wherever it is; None if it has already ended."""
        sequence = self.find(seq_id)
        if sequence is None:
            return None
        for parent in self.unfinished():
            if sequence in parent.forks:
                sequence.finish_reason = reason
                parent.forks.remove(sequence)
                self.num_finished += 1
                return sequence
        self.retire(sequence, reason)
        return sequence

    def release(self, seq_id: int) -> None:
        """Give up a kept sequence's cache, unless that has happened already."""
        if self.kept.pop(seq_id, None) is not None:
            self.cache.remove(seq_id)

    def recover(self, outcomes: Items[Outcome] = ()) -> None:
        """Go on after an exception, whatever state it left: outcomes that were chosen are taken, the cache is emptied,
        and everyone who has not ended waits again.

        May itself be interrupted and called again.
        """
        everyone = {sequence.seq_id: sequence for sequence in self.unfinished()}
        for outcome in flat(outcomes):
            sequence = everyone.get(outcome.seq_id)
            if sequence is not None:
                if len(sequence.token_ids) == outcome.position:
                    sequence.token_ids += outcome.token_ids
                if outcome.finish_reason is not None:
                    sequence.stop_reason, sequence.finish_reason = outcome.stop_reason, outcome.finish_reason
        left = [sequence for sequence in everyone.values() if sequence.finish_reason is None]
        for sequence in everyone.values():
            with_parent = [one for one in sequence.forks if one in left and not one.num_output_tokens]
            sequence.forks = with_parent
            if sequence.finish_reason is not None and with_parent:
                with_parent[0].forks = with_parent[1:]
                sequence.forks = []
        forks = {fork.seq_id for sequence in left for fork in sequence.forks}
        self.num_finished += len(everyone) - len(left)
        self.waiting = sorted((one for one in left if one.seq_id not in forks), key=self.order)
        self.running, self.swapped, self.kept = {}, {}, {}
        self.host.entries.clear()
        self.cache.clear()
        self.stats = self.cache.stats()

    def check_invariants(self) -> None:
        """Raise AssertionError if a sequence is in two containers or the cache disagrees with its tokens."""
        # A sequence that continues another has that one's id, which is in `kept` until it begins.
        ids = [one.seq_id for one in self.unfinished() if one.continues not in self.kept] + list(self.kept)
        assert len(ids) == len(set(ids)), "a sequence is in two containers"
        assert len(self.running) <= self.config.max_num_seqs, "more sequences run than may"
        assert self.waiting == sorted(self.waiting, key=self.order), "the queue is out of order"
        assert self.host.entries.keys() == self.swapped.keys(), "the host's pool does not hold just the swapped"
        assert self.host.num_free >= 0, "the host's pool holds more than it has room for"
        for seq_id, sequence in self.running.items():
            computed, reserved = self.cache.computed_length(seq_id), self.cache.reserved_length(seq_id)
            assert computed <= reserved <= len(sequence.token_ids), "slots are reserved for nobody's tokens"
            assert computed < len(sequence.token_ids), "the cached length is past the next position"
            if self.cache.persistent and computed < len(sequence.token_ids) - 1:
                assert reserved == len(sequence.token_ids), "a prompt under way has not all of its slots"
        for one in self.unfinished():
            if one.seq_id not in self.running and one.continues is None:
                assert one.seq_id not in self.cache, "a sequence that does not run holds something in the cache"
        self.cache.check_invariants()
