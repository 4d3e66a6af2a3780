"""Prefill-only sequences: answered by one forward pass, with blocks that live for one step.

Served as a generation, such a sequence would take a slot among the running ones and blocks for its whole prompt, and
wait for both. Here it takes some rows of one step. Its keys and values lie in *scratch blocks* past the pool, which
mean nothing once the step is over; only a prefix that others need too is computed into blocks of the pool and stays
cached.

A step that runs nothing else has a budget of its own for them (`prefill_only_tokens`, and bytes of temporary arrays).
Beside generations they get the tokens that are left of the step's one budget. A prompt that finds too few there becomes
a generation until it is computed, in chunks: however long it is, it makes no running sequence wait longer.
"""

from collections.abc import Callable

from forge.cache.kv_cache import NO_HIT, Hit
from forge.engine.containers import Containers
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanBuilder, PlanItem
from forge.reasons import NoBlocks, NoBudget, WaitReason


class PrefillOnly:
    """Reserves the transient blocks of prefill-only sequences, and releases them when their step is committed."""

    def __init__(self, containers: Containers, scratch: range):
        """scratch: blocks past the cache's own."""
        self._cache, self._config, self._planner, self._queue, *_ = containers
        self.scratch = scratch
        self.temporary_bytes: Callable[[int, int], int] = lambda rows, logit_rows: 0
        """What a forward of so many rows, so many of them with logits, needs for itself. The engine sets it."""
        self._in_chunks = self._config.chunked_prefill and self._cache.persistent
        """Whether a prompt that exceeds a step's tokens can be computed in several steps."""

    def admit(self, sequence: Sequence, plan: PlanBuilder) -> WaitReason | None:
        """Give a sequence its rows in this step and leave the queue, or say why it has to wait.

        Where it would not hold a generation up, one is admitted per step, however large.
        """
        config = self._config
        spent = NoBudget(config.prefill_only_tokens, "prefill_only_tokens")
        tokens = config.prefill_only_tokens - plan.prefill_only_rows
        if plan.items and plan.budget < tokens:
            spent, tokens = NoBudget(plan.limit), plan.budget
        if tokens <= 0:
            return spent
        hit = self._whole_blocks(sequence)
        deferral = self._planner.deferral(sequence, hit.num_tokens, plan) if sequence.prefix_keys else None
        if deferral is not None:
            return deferral
        length = len(sequence.token_ids)
        num_rows = length - hit.num_tokens
        logit_rows = sequence.task.logit_rows(hit.num_tokens, length)
        num_bytes = self.temporary_bytes(num_rows, 0 if sequence.task.pooling else len(logit_rows))
        is_first = _is_first(plan)
        holds_up = plan.items if self._in_chunks else plan.prefill_tokens
        if num_rows > tokens and (holds_up or not is_first):
            return spent
        if plan.temporary_bytes + num_bytes > config.prefill_only_memory and not is_first:
            return NoBudget(config.prefill_only_memory, "prefill_only_memory")
        num_blocks = -(-num_rows // self._cache.block_size)
        num_free = len(self.scratch) - plan.num_scratch_blocks
        if num_blocks > num_free:
            return NoBlocks(num_blocks, num_free)
        plan.prefill_only_rows += num_rows
        plan.budget -= num_rows
        plan.temporary_bytes += num_bytes
        self._begin(sequence, hit, logit_rows, plan)
        return None

    def needs_chunks(self, reason: WaitReason | None, plan: PlanBuilder) -> bool:
        """True if a sequence that `admit` refused for `reason` should begin with what generations leave of this step,
        to be computed in chunks beside them: otherwise a long prompt would hold them up, or never find room."""
        return isinstance(reason, NoBudget) and self._in_chunks and _is_first(plan) and plan.budget > 0

    def has_room(self, passing: Sequence, passed: Sequence, plan: PlanBuilder) -> bool:
        """True if a long sequence that a short one passes could still be computed in the same step."""
        size = self._cache.block_size
        num_blocks = -(-len(passing.token_ids) // size) + -(-len(passed.token_ids) // size)
        return num_blocks <= len(self.scratch) - plan.num_scratch_blocks

    def commit(self, item: PlanItem, broken: bool) -> None:
        """Commit an item: cache the blocks that are to be published and release the rest.

        broken: its logits were not numbers, so what it wrote must not serve other sequences.
        """
        cache, sequence = self._cache, item.sequence
        if item.seq_id in cache:
            computed = cache.computed_length(item.seq_id)
            if item.num_published > computed and not broken:
                cache.commit(item.seq_id, sequence.token_ids[computed : item.num_published])
            cache.remove(item.seq_id)
        self._planner.remember(sequence)

    def _whole_blocks(self, sequence: Sequence) -> Hit:
        """Return how many whole blocks of the prompt are cached, if there are blocks enough to hold them. A part of a
        block would have to be copied for one step's use."""
        if not sequence.prefix_keys:
            return NO_HIT
        cache, size = self._cache, self._cache.block_size
        hit = cache.lookup(sequence.token_ids, sequence.salt, len(sequence.prefix_keys) * size)
        if hit.num_tokens % size:
            hit = cache.lookup(sequence.token_ids, sequence.salt, hit.num_tokens // size * size)
        return hit if cache.blocks_to_begin(hit, hit.num_tokens) <= cache.num_available else NO_HIT

    def _begin(self, sequence: Sequence, hit: Hit, logit_rows: range, plan: PlanBuilder) -> None:
        """Attach the cached blocks, reserve those that will be published, and scratch blocks for the rest."""
        cache, size = self._cache, self._cache.block_size
        end = max(len(hit.blocks), self._planner.num_worth_caching(sequence)) * size
        if cache.blocks_to_begin(hit, end) > cache.num_available:
            end = hit.num_tokens
        table: tuple[int, ...] = ()
        if end:
            cache.add(sequence.seq_id, sequence.token_ids, sequence.salt, hit.num_tokens)
            plan.copies += cache.reserve(sequence.seq_id, end - hit.num_tokens)
            table = cache.block_table(sequence.seq_id)
            self._planner.claim(sequence, hit.num_tokens, plan, len(table))
        self._queue.remove(sequence)
        start, length = hit.num_tokens, len(sequence.token_ids)
        num_scratch = -(-length // size) - len(table)
        table += tuple(self.scratch[plan.num_scratch_blocks : plan.num_scratch_blocks + num_scratch])
        plan.num_scratch_blocks += num_scratch
        rows = (start, length - start, logit_rows, sequence.max_output_tokens > 0)
        item = PlanItem(sequence.seq_id, sequence, *rows, "prefill_only", table, num_published=end)
        plan.prefill_only.append(item)
        plan.needs_hidden |= sequence.task.pooling is not None


def _is_first(plan: PlanBuilder) -> bool:
    """True if the step has no prefill-only sequence yet but those that pass longer ones."""
    return len(plan.prefill_only) == plan.num_passing
