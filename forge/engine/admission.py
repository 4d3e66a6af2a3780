"""Who may begin: waiting sequences are admitted in order until one does not fit.

What the running sequences need in this step counts as taken, so admitting never preempts. A sequence is admitted with
room for all of its tokens, however many steps they take. Those that are deferred (another one computes what they begin
with too) let others pass; nobody passes one that does not fit.
"""

from collections.abc import Sequence as Items
from heapq import merge

from forge.cache.kv_cache import NO_HIT
from forge.engine.containers import Containers
from forge.engine.oneshot import MAX_DEFERRALS
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Draft, Swap
from forge.trace.records import AdmitRecord, Deferred, MaxNumSeqs, NoBlocks, NoBudget, WaitReason, WaitRecord


def admit(among: Containers, draft: Draft) -> None:
    """Begin waiting sequences, in order, until one does not fit. Those that are deferred let others pass."""
    if not (among.waiting or among.swapped):
        return
    line = list(merge(among.waiting, sorted(among.swapped.values(), key=among.order), key=among.order))
    for sequence in line:
        refusal = _try_to_begin(among, sequence, draft)
        if refusal is not None:
            draft.waiting.append(WaitRecord(sequence.seq_id, refusal))
            if isinstance(refusal, Deferred):
                sequence.times_deferred += 1
                continue
            if not among.running and not isinstance(refusal, MaxNumSeqs):
                draft.give_up(sequence.seq_id)
            return


def lead(sequence: Sequence, num_cached: int, block_size: int, draft: Draft) -> None:
    """What this sequence computes others need not compute too."""
    for key in sequence.prefix_keys[num_cached // block_size :]:
        draft.leaders.setdefault(key, sequence.seq_id)


def _leader(sequence: Sequence, num_cached: int, block_size: int, draft: Draft) -> Deferred | None:
    """The sequence that is computing what this one would compute next, if it is worth waiting for."""
    keys = sequence.prefix_keys[num_cached // block_size :]
    leader = draft.leaders.get(keys[0]) if keys else None
    if leader is None or sequence.times_deferred >= MAX_DEFERRALS:
        return None
    return Deferred(leader, block_size * sum(draft.leaders.get(key) == leader for key in keys))


def _try_to_begin(among: Containers, sequence: Sequence, draft: Draft) -> WaitReason | None:
    """Admit a sequence with room for all its tokens, or say why it has to wait."""
    cache, config = among.cache, among.config
    if len(among.running) >= config.max_num_seqs:
        return MaxNumSeqs(config.max_num_seqs)
    own = _adopt_kept(among, sequence)
    while True:
        num_cached, cost = _cost_of_beginning(among, sequence, own)
        deferral = _leader(sequence, num_cached, cache.block_size, draft)
        if deferral is not None:
            return deferral
        uncached = len(sequence.token_ids) - num_cached
        if draft.budget < (1 if config.chunked_prefill else uncached):
            return NoBudget(draft.limit)
        room = cache.num_available - sum(draft.needs.values())
        if cost <= room:
            _begin(among, sequence, own, draft)
            return None
        oldest = next((seq_id for seq_id in among.kept if seq_id != own), None)
        if oldest is None:
            return NoBlocks(cost, max(0, room))
        among.release(oldest)


def _adopt_kept(among: Containers, sequence: Sequence) -> int | None:
    """The kept sequence that this one continues, if it is still there, cut down to what the two have in common."""
    if sequence.continues not in among.kept:
        return None
    kept = among.kept[sequence.continues]
    common = _num_common(sequence.token_ids, kept.token_ids)
    among.cache.truncate(kept.seq_id, min(common, sequence.most_cached))
    return kept.seq_id


def _cost_of_beginning(among: Containers, sequence: Sequence, own: int | None) -> tuple[int, int]:
    """How many tokens need no computing, and how many blocks the sequence takes. Changes nothing."""
    cache, length = among.cache, len(sequence.token_ids)
    if own is not None:
        return cache.computed_length(own), cache.blocks_needed(own, length - cache.reserved_length(own))
    if sequence.seq_id in among.swapped:
        return among.host.entries[sequence.seq_id].num_tokens, cache.blocks_to_begin(NO_HIT, length)
    hit = cache.lookup(sequence.token_ids, sequence.salt, sequence.most_cached)
    return hit.num_tokens, cache.blocks_to_begin(hit, length)


def _begin(among: Containers, sequence: Sequence, own: int | None, draft: Draft) -> None:
    """Give an admitted sequence its place in the cache, and its tokens of this step."""
    cache, seq_id, length = among.cache, sequence.seq_id, len(sequence.token_ids)
    available = cache.num_available
    how = "recompute" if sequence.num_output_tokens or sequence.times_preempted else "new"
    if seq_id in among.swapped:
        how, num_cached = "swap", among.host.entries[seq_id].num_tokens
        cache.add(seq_id, (), sequence.salt)
    elif own is not None:
        num_cached = cache.computed_length(own)
        del among.kept[own]
    else:
        num_cached = cache.add(seq_id, sequence.token_ids, sequence.salt, sequence.most_cached)
    sequence.continues = None  # from here on it is an ordinary sequence, recomputed if it must be
    draft.copies += cache.reserve(seq_id, length - cache.reserved_length(seq_id))
    among.running[seq_id] = sequence
    if how == "swap":
        table = cache.block_table(seq_id)[: among.host.entries[seq_id].num_blocks]
        draft.swap_ins.append(Swap(seq_id, table))
        draft.starts[seq_id] = num_cached
        del among.swapped[seq_id]
    else:
        among.waiting.remove(sequence)
    lead(sequence, num_cached, cache.block_size, draft)
    draft.tokens[seq_id] = min(length - num_cached, draft.budget)
    draft.budget -= draft.tokens[seq_id]
    draft.needs[seq_id] = 0
    draft.admitted.append(AdmitRecord(seq_id, how, num_cached, available - cache.num_available))


def _num_common(ours: Items[int], theirs: Items[int]) -> int:
    """How many tokens the two begin with in common."""
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, (our, their) in enumerate(pairs) if our != their), min(len(ours), len(theirs)))
