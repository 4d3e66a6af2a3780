"""The loop: plan a step, run it, choose tokens, take the results. One loop for one prompt and for thousands.

    schedule() ─▶ StepPlan ─▶ ForwardBatch ─▶ model.forward ─▶ logits ─▶ choose ─▶ commit() ─▶ StepRecord
                     └▶ propose() ─┘                                 (or verify)

The engine prints nothing and knows no view. Whoever wants to see what happens reads the `StepRecord` that each step
returns.

A step happens whole or not at all. The moment the last of its tokens is chosen they are noted down in one assignment;
before that an exception undoes the step, after it the tokens are taken (`between_steps`).

On a device that computes by itself the next step is launched before this one is read (`lookahead`).

If the model becomes unavailable, the next step ends every sequence with that error.
"""

import time

import numpy as np

from forge.backends.logits import greatest
from forge.engine.answers import OneShotResult, wants_likeliest
from forge.engine.between_steps import BetweenSteps
from forge.engine.choosing import Choices
from forge.engine.lookahead import Flight, plan_ahead, without_ended
from forge.engine.proposer import StepCost
from forge.engine.step_plan import StepPlan
from forge.engine.step_records import cache_record, item_records, map_of_written
from forge.model.model import ModelUnavailable
from forge.trace.records import StepRecord


class Engine(BetweenSteps):
    """A model, a cache and a scheduler, turned one step at a time by `step()`."""

    def step(self) -> StepRecord:
        """Run one step. Call only while `has_unfinished()`; after an exception from it, whatever it was, too.

        Raises AssertionError for a rule that does not hold, where `checks_invariants` is set.
        """
        self._settle()
        try:
            try:
                record = self._run_step()
                if self.checks_invariants:
                    self.scheduler.check_invariants()
                return record
            except ModelUnavailable as error:
                self._unsettled = True
                self._settle()
                return self._end_all(str(error))
        except BaseException:
            self._unsettled = True
            raise

    def _run_step(self) -> StepRecord:
        started = time.perf_counter()
        flight = self._next_flight(started)
        self._ahead = self._look_ahead(flight)
        waited = time.perf_counter()
        watching = self.on_logits, self.report_probabilities
        asked = flight.plan.items or any(wants_likeliest(one.request, *watching) for one in flight.joining)
        likeliest, tops = greatest(flight.logits) if asked and len(flight.logits) else ([], [])
        read = time.perf_counter() if self._runs_ahead else waited  # a device had to be waited for
        choices = Choices(self.scheduler, self.speculation, self._eos_token_ids, *watching)
        choices.choose(flight.plan, flight.guesses, flight.logits, likeliest, tops)
        answers = flight.answers | self._oneshots.answer(flight.joining, flight.logits, likeliest, tops, *watching)
        forward_ms = flight.launch_ms + (read - waited) * 1e3
        return self._take(flight, choices, answers, forward_ms, started, read, time.perf_counter())

    def _next_flight(self, started: float) -> Flight:
        """The step that was launched ahead, or one that is decided and launched now."""
        flight, self._plan = self._ahead, None
        if flight is not None:
            self.model.check_available()
            self._plan = flight.plan
            return flight
        self._plan = self.scheduler.schedule()
        return self._launch(self._plan, started)

    def _look_ahead(self, flight: Flight) -> Flight | None:
        """Launch the step after one that is under way, if what it is follows from that one alone (`lookahead`)."""
        watched = self.on_logits is not None or self.report_probabilities
        if not self._runs_ahead or watched or self.speculation.proposers or not self._is_available():
            return None
        started = time.perf_counter()
        plan = plan_ahead(self.scheduler, flight.plan)
        if plan is None:
            return None
        if not isinstance(flight.logits, np.ndarray):
            flight.logits.let_go()  # its tokens are the likeliest, and that is all that is asked
        return self._launch(plan, started)

    def _is_available(self) -> bool:
        try:
            self.model.check_available()
        except ModelUnavailable:
            return False
        return True

    def _launch(self, plan: StepPlan, started: float) -> Flight:
        """Begin to carry out a plan that was begun at `started`: guess, move blocks, and start the forward pass."""
        assert plan.items or plan.oneshots or plan.exhausted, f"nothing can run: {plan.waiting}"
        running = self.scheduler.running
        guesses = self.speculation.propose(plan, running)
        for seq_id, failure in guesses.failures.items():
            running[seq_id].note(failure.message)
        joining = self._oneshots.joining(plan.oneshots)
        batch = self._rows.batch(plan, running, guesses.runs, joining) if plan.items or joining else None
        self._move_blocks(plan)
        launched = time.perf_counter()
        logits = self.model.forward(batch, self.storage) if batch is not None else None
        answers = self._oneshots.run_apart(plan.oneshots, self.model, self.on_logits, self.report_probabilities)
        launch_ms = (time.perf_counter() - launched) * 1e3
        schedule_ms = (launched - started) * 1e3 - guesses.total_ms
        return Flight(plan, guesses, joining, batch, logits, answers, schedule_ms, launch_ms)

    def _take(
        self,
        flight: Flight,
        choices: Choices,
        answers: dict[int, OneShotResult],
        forward_ms: float,
        started: float,
        read: float,
        ended: float,
    ) -> StepRecord:
        """Take what a step brought, and say so. Its logits were there to be `read`, its tokens when it `ended`."""
        plan, guesses, batch, running = flight.plan, flight.guesses, flight.batch, self.scheduler.running
        if plan.ahead:
            plan = without_ended(plan, running)
            self._in_vain += len(flight.plan.items) - len(plan.items)
        items = item_records(plan.items, guesses.runs)
        num_rows, num_logit_rows = (batch.num_rows, len(batch.logit_rows)) if batch is not None else (0, 0)
        cost = StepCost(num_rows, forward_ms, (ended - started) * 1e3 - guesses.total_ms)
        learned = self.speculation.learn(plan, guesses, choices.verified, choices.outcomes, running, cost)
        self._decided = choices.outcomes, learned  # from here on the step has happened
        self._work.enter(plan, items, choices.tokens, forward_ms, started, ended)
        answered = self._oneshots.end(plan.oneshots, answers, forward_ms, started, ended)
        self.speculation.commit(learned)
        self.storage.copy_blocks(self.scheduler.commit(plan, choices.outcomes, answered.broken))
        self._decided = None
        for finish in choices.finished:
            self._forget(finish.seq_id)
        self._drop_empty_flight()
        return self._record(
            items=(*items, *item_records([one.item for one in plan.oneshots])),
            tokens=(*choices.tokens, *answered.tokens),
            finished=(*choices.finished, *answered.finished),
            schedule_ms=flight.schedule_ms,
            forward_ms=forward_ms,
            sample_ms=(ended - read) * 1e3,
            started=started,
            ended=ended,
            execution_class=plan.execution_class,
            admitted=plan.admitted,
            waiting=plan.waiting,
            preempted=plan.preempted,
            block_table_entries=sum([len(item.block_table) for item in plan.items]),
            temporary_bytes=self._bytes_of(num_rows, num_logit_rows),
            events=self.cache.take_events(),
            blocks=map_of_written(self.scheduler.block_map, batch, self.cache.block_size),
            cycles=learned.cycles,
            execution=getattr(flight.logits, "execution", None),
            planned_ahead=plan.ahead,
        )

    def _move_blocks(self, plan: StepPlan) -> None:
        """Carry out what a plan moves before it writes: nothing is overwritten before it has been read."""
        storage, host = self.storage, self.scheduler.host
        for swap in plan.swap_outs:
            host.fill(swap.seq_id, storage.read_blocks(swap.blocks))
        if plan.copies:
            storage.copy_blocks(plan.copies)
        for swap in plan.swap_ins:
            storage.write_blocks(swap.blocks, host.data(swap.seq_id))

    def _record(self, **fields) -> StepRecord:
        """A step's record: what it did, and where everything is now."""
        self._steps += 1
        rejected, self._rejected = tuple(self._rejected), []
        arrived, self._arrived = tuple(self._arrived), []
        discarded, self._in_vain = self._in_vain, 0
        return StepRecord(
            step=self._steps,
            cache=cache_record(self.cache.kind, self.storage.layout, self.scheduler.stats),
            queues=self.scheduler.queues,
            rejected=rejected,
            arrived=arrived,
            discarded=discarded,
            **fields,
        )

    def _end_all(self, error: str) -> StepRecord:
        """The model is gone: every sequence ends, with what it has."""
        started = time.perf_counter()
        sequences = reversed(list(self.scheduler.unfinished()))  # forks before those whose prompt they share
        finished = [self._end_sequence(sequence, "error", error) for sequence in sequences]
        for request in list(self.scheduler.oneshots.requests()):
            finished.append(self._oneshots.abort(request.request_id, "error", self.scheduler, error))
        times = {"schedule_ms": 0.0, "forward_ms": 0.0, "sample_ms": 0.0, "started": started}
        return self._record(items=(), tokens=(), finished=tuple(finished), ended=time.perf_counter(), **times)
