"""The load of one engine, counted beside it: what its routers compare."""

from forge.cluster.fleet import Load
from forge.engine.scheduler import Scheduler


class LoadMeter:
    """Counts the prompt tokens that a scheduler's sequences have yet to compute.

    Of a sequence that runs the cache knows how far it is. What a waiting one will find in the cache is known when it is
    admitted; until then it is what the router expected.
    """

    def __init__(self, scheduler: Scheduler):
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
