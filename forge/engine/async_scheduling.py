"""Async scheduling: the host plans and launches step n + 1 while the device computes step n.

A device that computes by itself idles while the host reads tokens, plans, and builds the next batch: with a small
model, for longer than a step takes. But what follows a step of plain decodes is nearly known: the same sequences, one
position further. Only the tokens are missing, and those the device has itself: an input token may be "the token of row
r of the forward before this one", which is its argmax, or what the device drew from it (`DeviceLogits.sample`: the same
definition of sampling, so the same token as on the host). So step n + 1 is launched before step n is read
("asynchronous scheduling" in vLLM, the "overlap scheduler" of SGLang).

    device   [ step n     ][ step n + 1 ][ step n + 2 ]
    host       plan n + 1 ·read n·  plan n + 2 ·read n + 1·

What can go wrong, and what becomes of it:

- Step n ends a sequence (end of text, a stop string). Then its row of step n + 1 is wasted and thrown away
  (`StepRecord.discarded`); what was reserved for it went back with all that it had. A sequence that gets its last
  allowed token in step n is left out from the start. An abort is the same.
- A request arrives, a block is missing, a token must be shown with its probability or obey a grammar, draft tokens are
  to be verified: then step n is read first, and the scheduler decides as ever.
- A block of a sequence that ended may be given to another while step n + 1 has yet to write into it: the device works
  in order, so the other's forward comes later and writes over it. It was never in an index: those learn tokens at
  `commit`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from forge.engine.proposer import StepDrafts
from forge.engine.readout import SeparateResult
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanItem, StepPlan
from forge.model.forward_batch import ForwardBatch
from forge.model.logits import Draw, Logits
from forge.trace.records import MaxNumSeqs, NoBlocks


@dataclass(frozen=True)
class InFlightStep:
    """A step from the launch of its forward pass until its logits are read."""

    plan: StepPlan
    drafts: StepDrafts
    batch: ForwardBatch | None
    logits: Logits
    separate: list[SeparateResult]
    schedule_ms: float
    """Without the time of proposers."""
    launch_ms: float
    """Until the model returned, which need not mean that it had computed."""


class AsyncScheduling:
    """Keeps one step in flight beyond the one that is read. Used with models that return before they have computed."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self.in_flight: InFlightStep | None = None
        """The next step, where it was launched before this one was read."""
        self.wasted_rows = 0
        """Wasted rows that are not yet in a `StepRecord`."""
        self._refused_at: tuple[int, ...] | None = None

    def next_step(
        self, launch: Callable[[StepPlan, float], InFlightStep], may_look_ahead: bool, started: float
    ) -> InFlightStep:
        """The step in flight, or one that is scheduled and launched now; the one after it is launched too if it follows
        from this one alone."""
        step, self.in_flight = self.in_flight, None
        if step is None:
            plan = self._scheduler.schedule()
            refused = not plan.preempted and all(isinstance(one.reason, NoBlocks | MaxNumSeqs) for one in plan.waiting)
            self._refused_at = self._state() if refused else None
            step = launch(plan, started)
        started = time.perf_counter()
        on_device = None if isinstance(step.logits, np.ndarray) else step.logits
        following = self._plan_next(step.plan, on_device is not None) if may_look_ahead else None
        if following is not None:
            if on_device is not None:
                if not all(item.sequence.params.plain_greedy for item in step.plan.items):
                    on_device.sample([_draw(item.sequence) for item in step.plan.items])
                on_device.release()  # nothing but its tokens will be read
            self.in_flight = launch(following, started)
        return step

    def without_ended(self, step: InFlightStep) -> InFlightStep:
        """A step that was planned ahead, without the sequences that have ended since."""
        if not step.plan.ahead:
            return step
        items = tuple([item for item in step.plan.items if item.sequence.finish_reason is None])
        self.wasted_rows += len(step.plan.items) - len(items)
        return replace(step, plan=replace(step.plan, items=items))

    def take_wasted_rows(self) -> int:
        wasted, self.wasted_rows = self.wasted_rows, 0
        return wasted

    def drop_if_empty(self) -> None:
        """Drop the step in flight once all of its sequences have ended."""
        step = self.in_flight
        if step is not None and not any(item.seq_id in self._scheduler.running for item in step.plan.items):
            self.wasted_rows += len(step.plan.items)
            self.in_flight = None

    def clear(self) -> None:
        """Forget the step in flight: everything begins again from the tokens."""
        self.in_flight = self._refused_at = None

    def may_admit(self) -> bool:
        """True if the next step might admit a sequence: not if all that wait were refused a slot or blocks by the last
        step that was scheduled, and none has arrived or ended since."""
        return bool(self._scheduler.queue.sequences) and self._refused_at != self._state()

    def _state(self) -> tuple[int, ...]:
        scheduler = self._scheduler
        return len(scheduler.queue.sequences), len(scheduler.retained.sequences), scheduler.num_finished

    def _plan_next(self, plan: StepPlan, can_draw: bool) -> StepPlan | None:
        """The step after `plan`: its sequences one position further, each with a slot reserved.

        can_draw: the device can choose tokens that are not the argmax. None, with nothing changed, where what follows
        does not follow from `plan` alone.
        """
        cache, running = self._scheduler.cache, self._scheduler.running
        if self.may_admit() or not cache.persistent:
            return None
        following = [(row, item) for row, item in enumerate(plan.items) if item.seq_id in running]
        if len(following) < len(running) or not _is_plain(plan, can_draw):
            return None
        following = [(row, item) for row, item in following if not _ends_with(item, item.sequence)]
        if not following or sum([cache.blocks_needed(item.seq_id, 1) for _, item in following]) > cache.num_available:
            return None
        copies = [copy for _, item in following for copy in cache.reserve(item.seq_id, 1)]
        items = [
            item._replace(start=item.start + 1, block_table=cache.block_table(item.seq_id), follows=row)
            for row, item in following
        ]
        return StepPlan(tuple(items), copies=tuple(copies), ahead=True)


def _is_plain(plan: StepPlan, can_draw: bool) -> bool:
    """True if a step is nothing but decodes, each with one row of logits from which the device can choose its token."""
    if plan.separate or plan.swap_ins or plan.exhausted:
        return False
    return all(
        item.phase == "decode"
        and item.num_tokens == len(item.logit_rows) == 1
        and item.samples
        and not item.num_draft_tokens
        and (item.sequence.params.plain_greedy or (can_draw and item.sequence.params.needs_token_only))
        for item in plan.items
    )


def _draw(sequence: Sequence) -> Draw:
    """The next token of a sequence. All tokens before it are known: the step before has been committed."""
    return Draw(sequence.params, sequence.seed, sequence.sample_index, sequence.token_ids, sequence.num_prompt_tokens)


def _ends_with(item: PlanItem, sequence: Sequence) -> bool:
    """True if the token that this item brings is the last that its sequence may have."""
    return item.start + 2 - sequence.num_prompt_tokens >= sequence.max_output_tokens
