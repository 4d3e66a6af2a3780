"""Making room: if the running sequences need more blocks than there are, victims give theirs up.

Who gives way is a policy (`policies`). What becomes of a victim is one too: its keys and values are dropped, to be
computed again, or go to the host's pool. Its tokens stay in any case, and it goes to the front of the queue. Each
preemption buys the one that asked a token in that very step, so work never goes round in circles.
"""

from forge.cache.block_table import blocks_for
from forge.engine.containers import Containers
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Draft, Swap
from forge.trace.records import HostPoolFull, NoBlocks, PreemptRecord


def make_room(among: Containers, draft: Draft) -> None:
    """Take blocks from victims until there are as many as the running sequences need."""
    if sum(draft.needs.values()) <= among.cache.num_available:
        return
    served: list[Sequence] = []
    for sequence in list(among.running.values()):
        if sequence.seq_id in among.running and _find_blocks(among, sequence, served, draft):
            served.append(sequence)


def _find_blocks(among: Containers, sequence: Sequence, served: list[Sequence], draft: Draft) -> bool:
    """Make room for one more sequence beside those that are served; False if it has to give way itself."""
    cache = among.cache
    name, choose_victim = among.config.victim_policy
    while True:
        more = len(sequence.token_ids) - cache.reserved_length(sequence.seq_id)
        needed = cache.blocks_needed(sequence.seq_id, more) if draft.tokens[sequence.seq_id] else 0
        draft.needs[sequence.seq_id] = needed
        free = cache.num_available - sum(draft.needs[other.seq_id] for other in served)
        if needed <= free:
            return True
        if among.kept:
            among.release(next(iter(among.kept)))
            continue
        victim = choose_victim(tuple(among.running.values()), sequence)
        if victim is None:
            draft.give_up(sequence.seq_id)
            return False
        _preempt(among, victim, sequence, NoBlocks(needed, max(0, free)), name, draft)
        if victim is sequence:
            return False
        if victim in served:
            served.remove(victim)


def _preempt(
    among: Containers, victim: Sequence, requester: Sequence, shortage: NoBlocks, policy: str, draft: Draft
) -> None:
    """Take a running sequence's blocks. Its tokens stay, and it goes back to its place in the queue, the front."""
    cache, host, seq_id = among.cache, among.host, victim.seq_id
    computed, available = cache.computed_length(seq_id), cache.num_available
    fallback = None
    mode = among.config.preemption if computed else "recompute"
    if mode == "swap":
        blocks = cache.block_table(seq_id)[: blocks_for(computed, cache.block_size)]
        if len(blocks) <= host.num_free:
            host.reserve(seq_id, len(blocks), computed)
            draft.swap_outs.append(Swap(seq_id, blocks))
            among.swapped[seq_id] = victim
        else:
            mode, fallback = "recompute", HostPoolFull(len(blocks), host.num_free)
    if mode == "recompute":
        among.enqueue(victim)
    del among.running[seq_id]
    del draft.tokens[seq_id]
    victim.times_preempted += 1
    cache.remove(seq_id)
    lost = computed if mode == "recompute" else 0
    freed = cache.num_available - available
    draft.preempted.append(
        PreemptRecord(seq_id, requester.seq_id, shortage.needed, shortage.free, policy, mode, lost, freed, fallback)
    )
