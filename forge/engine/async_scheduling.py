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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from forge.engine.engine import Engine
from forge.engine.sampler import LaunchedStep, StepResults
from forge.engine.step_plan import PlanItem, StepPlan
from forge.engine.structured_output import MatcherError
from forge.reasons import MaxNumSeqs, NoBlocks


class AsyncEngine(Engine):
    """The stepper for a model that returns before it has computed: it launches the next step before it reads this
    one."""

    _in_flight: LaunchedStep | None = None
    """The next step, where it was launched before this one was read."""
    _refused_at: tuple[int, ...] | None = None
    """The queue's state when the last scheduled step refused a slot or blocks to all that waited."""

    def _next_step(self, started: float) -> LaunchedStep:
        """Return the step in flight, or schedule and launch one. If the step after it follows from it alone, that is
        launched too, before the host waits for the device."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            step = super()._next_step(started)
            plan = step.plan
            refused = all(isinstance(wait.reason, NoBlocks | MaxNumSeqs) for wait in plan.waiting)
            self._refused_at = self._queue_state() if refused and not plan.preempted else None
        self._plan = step.plan
        self._launch_ahead(step)
        _prepare_masks(step.plan.items)  # while the device computes
        self._plan, waited = step.plan, time.perf_counter()  # launching the next one has replaced it
        if not isinstance(step.logits, np.ndarray):
            step.logits.argmax_rows()
        step.forward_ms += (time.perf_counter() - waited) * 1e3
        return step

    def _launch_ahead(self, step: LaunchedStep) -> None:
        """Launch the step after `step`, unless that depends on the tokens of `step`."""
        if self.on_logits or self.report_probabilities or self.proposers:
            return
        started, on_device = time.perf_counter(), None if isinstance(step.logits, np.ndarray) else step.logits
        plan = self._plan_next(step.plan, on_device is not None)
        if plan is None:
            return
        if on_device is not None:
            if not all(item.sequence.params.plain_greedy for item in step.plan.items):
                on_device.sample([item.sequence.draw for item in step.plan.items])
            on_device.release()  # nothing but its tokens will be read
        self._in_flight = self._launch(plan, started)

    def _commit(self, step: LaunchedStep, results: StepResults, seconds: float) -> None:
        """Commit a step without the sequences that have ended since it was planned ahead."""
        items = tuple([item for item in step.plan.items if item.sequence.finish_reason is None])
        self._records.discarded += len(step.plan.items) - len(items)
        step.plan = replace(step.plan, items=items)
        super()._commit(step, results, seconds)

    def _drop_state(self, seq_id: int) -> None:
        """Drop a sequence's state, and the step in flight if none of its sequences is left."""
        super()._drop_state(seq_id)
        step = self._in_flight
        if step is not None and not any(item.seq_id in self.scheduler.running for item in step.plan.items):
            self._records.discarded += len(step.plan.items)
            self._in_flight = None

    def _drop_steps(self) -> None:
        self._in_flight = self._refused_at = None

    def may_admit(self) -> bool:
        """True if the next step might admit a sequence: not if all that wait were refused a slot or blocks by the last
        step that was scheduled, and none has arrived or ended since."""
        return bool(self.scheduler.queue.sequences) and self._refused_at != self._queue_state()

    def _queue_state(self) -> tuple[int, ...]:
        scheduler = self.scheduler
        return len(scheduler.queue.sequences), len(scheduler.retained.sequences), scheduler.num_finished

    def _plan_next(self, plan: StepPlan, can_draw: bool) -> StepPlan | None:
        """Plan the step after `plan`: its sequences one position further, each with a slot reserved.

        can_draw: the device can choose tokens that are not the argmax. None, with nothing changed, where what follows
        does not follow from `plan` alone.
        """
        cache, running = self.cache, self.scheduler.running
        if self.may_admit():
            return None
        following = [(row, item) for row, item in enumerate(plan.items) if item.seq_id in running]
        if len(following) < len(running) or not _is_plain(plan, can_draw):
            return None
        following = [(row, item) for row, item in following if not _ends_with(item)]
        if not following or sum([cache.blocks_needed(item.seq_id, 1) for _, item in following]) > cache.num_available:
            return None
        copies = [copy for _, item in following for copy in cache.reserve(item.seq_id, 1)]
        items = [
            item._replace(start=item.start + 1, block_table=cache.block_table(item.seq_id), follows=row)
            for row, item in following
        ]
        return StepPlan(tuple(items), copies=tuple(copies), ahead=True)


def _prepare_masks(items: Iterable[PlanItem]) -> None:
    """Compute the masks of a step's items before there are logits to apply them to. Raises nothing."""
    for item in items:
        for sequence in (item.sequence, *item.sequence.waiting_samples) if item.chooses_token else ():
            if sequence.matcher is not None:
                with suppress(MatcherError):  # raised again where the token is chosen
                    sequence.matcher.mask(sequence.output_token_ids)


def _is_plain(plan: StepPlan, can_draw: bool) -> bool:
    """True if a step is nothing but decodes, each with one row of logits from which the device can choose its token."""
    if plan.separate or plan.swap_ins or plan.exhausted:
        return False
    return all(
        item.phase == "decode"
        and item.num_tokens == len(item.logit_rows) == 1
        and item.chooses_token
        and not item.num_draft_slots
        and (item.sequence.params.plain_greedy or (can_draw and item.sequence.params.needs_token_only))
        for item in plan.items
    )


def _ends_with(item: PlanItem) -> bool:
    """Return whether this item's token is the last that its sequence may have."""
    return item.start + 2 - item.sequence.num_prompt_tokens >= item.sequence.max_output_tokens
