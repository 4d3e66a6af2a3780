"""Looking one step ahead: the host plans and launches step n + 1 while the device computes step n.

A device that works by itself stands still while the host reads tokens, plans, and lays out the next batch: with a small
model, for longer than a step takes. But what comes after a step of plain decodes is nearly known: the same sequences,
one position further. Only the tokens are missing, and those the device has itself: an input token may be "the likeliest
of row r of the forward before this one". So step n + 1 is launched before anybody has looked at step n ("asynchronous
scheduling" in vLLM, the "overlap scheduler" of SGLang).

    device   [ step n     ][ step n + 1 ][ step n + 2 ]
    host       plan n + 1 ·read n·  plan n + 2 ·read n + 1·

What can go wrong, and what becomes of it:

- Step n ends a sequence (end of text, a stop string). Then its row of step n + 1 is computed in vain and thrown away
  (`StepRecord.discarded`); what was reserved for it went back with all that it had. A sequence whose last allowed token
  step n brings is left out from the start. An abort is the same.
- Somebody arrives, a block is missing, a token must be drawn or shown with its odds, guesses are to be verified: then
  nothing is looked ahead, the step is read, and the scheduler decides as ever. So it need not know of any of this.
- A block of a sequence that ended may be given to another while step n + 1 has yet to write into it: the device works
  in order, so that other one's forward comes later and writes over it. Nothing of it was ever in an index: those learn
  tokens at `commit`, and step n + 1 is committed after it is read, as any step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from forge.engine.answers import OneShotResult
from forge.engine.oneshot import OneShotItem
from forge.engine.proposer import StepDrafts
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanItem, StepPlan
from forge.model.forward_batch import ForwardBatch
<<<<<<< HEAD
=======
from forge.model.logits import Logits
from forge.speculation.speculator import StepGuesses
>>>>>>> 6c25cb6


@dataclass(frozen=True)
class Flight:
    """A step on its way, from the launch of its forward pass until its logits are read."""

    plan: StepPlan
    guesses: StepDrafts
    joining: list[OneShotItem]
    """Requests that keep nothing and have rows in the batch."""
    batch: ForwardBatch | None
    logits: Logits | None
    answers: dict[int, OneShotResult]
    """Of requests that have passes of their own."""
    schedule_ms: float
    launch_ms: float
    """Until the model returned, which need not mean that it had computed."""

    def has_any_of(self, running: Mapping[int, Sequence]) -> bool:
        """Whether any of its sequences still runs: without one it brings nothing to anybody."""
        return any(item.seq_id in running for item in self.plan.items)


def plan_ahead(scheduler: Scheduler, plan: StepPlan) -> StepPlan | None:
    """The step after `plan`, which is under way: its sequences one position further, each with a slot reserved for it.

    None, with nothing changed, where what follows does not follow from `plan` alone.
    """
    cache, running = scheduler.cache, scheduler.running
    if scheduler.may_admit() or not cache.persistent:
        return None
    following = [(row, item) for row, item in enumerate(plan.items) if item.seq_id in running]
    if len(following) < len(running) or not is_plain(plan, running):
        return None
    following = [(row, item) for row, item in following if not _ends_with(item, running[item.seq_id])]
    if not following or sum([cache.blocks_needed(item.seq_id, 1) for _, item in following]) > cache.num_available:
        return None
    copies = [copy for _, item in following for copy in cache.reserve(item.seq_id, 1)]
    items = [
        PlanItem(item.seq_id, item.start + 1, 1, range(1), True, "decode", cache.block_table(item.seq_id), follows=row)
        for row, item in following
    ]
    return StepPlan(tuple(items), copies=tuple(copies), ahead=True)


def is_plain(plan: StepPlan, running: Mapping[int, Sequence]) -> bool:
    """Whether a step is nothing but decodes whose tokens are the likeliest, each by a row of its own."""
    if plan.oneshots or plan.swap_ins or plan.exhausted:
        return False
    for item in plan.items:
        alone = item.phase == "decode" and item.num_tokens == len(item.logit_rows) == 1
        if not alone or not item.samples or item.num_guesses:
            return False
        if item.seq_id in running and not running[item.seq_id].params.plain_greedy:
            return False
    return True


def without_ended(plan: StepPlan, running: Mapping[int, Sequence]) -> StepPlan:
    """A plan that was made ahead, without the sequences that have ended since."""
    return replace(plan, items=tuple([item for item in plan.items if item.seq_id in running]))


def _ends_with(item: PlanItem, sequence: Sequence) -> bool:
    """Whether the token that this item brings is the last that its sequence may have."""
    return item.start + 2 - sequence.num_prompt_tokens >= sequence.max_output_tokens
