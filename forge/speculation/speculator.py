"""Speculation in the engine: who guesses for which sequence, how many tokens, and what is learned from that.

    wanted() ─▶ the scheduler finds room ─▶ propose() ─▶ one forward, verified ─▶ learn() ─▶ SpecCycle, and wanted()

How many guesses a sequence wants is decided sequence by sequence (`controller`). Under greedy it goes by times that are
measured here (`costs`), because there the tokens are the same whatever is guessed. Under sampling a draft's guesses
decide which draws a token is made from, so there it goes by costs that are fixed in advance, and by the sequence's own
history.

A proposer that fails (its lease was revoked, its logits are no numbers) is left out from then on, the cycle says why,
and the target goes on alone or with the other proposers. New ones can be set at any time between two steps.

What is known of a sequence is one value, replaced once its step has happened: an exception anywhere leaves either the
old one or the new one, and both are right.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forge.engine.proposer import (
    NO_DRAFTS,
    NO_UPDATE,
    Proposal,
    ProposalRequest,
    Proposer,
    ProposerFailure,
    SpeculationUpdate,
    StepCost,
    StepDrafts,
    Verification,
)
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Outcome, PlanItem, StepPlan
from forge.errors import ForgeError
from forge.speculation.controller import NO_CYCLES, Costs, RecentCycles, SpeculationControl
from forge.speculation.costs import CostMeter
from forge.speculation.verification import verify_forks, verify_likeliest
from forge.trace.records import SpecCycle, SpecDecision


@dataclass(eq=False)
class _Source:
    """A proposer beside what is known of it."""

    proposer: Proposer
    meter: CostMeter
    recent: RecentCycles = NO_CYCLES


class _State(NamedTuple):
    """What is known of a sequence."""

    control: SpeculationControl
    since: int
    """Tokens that it had when `control` was decided."""
    until: int
    """Tokens before which nobody need be asked."""
    follows: bool = False
    """Whether its proposers have seen all but its last few tokens."""
    silent: int = 0
    """How many times in a row nobody had a guess."""

    @classmethod
    def after(cls, control: SpeculationControl, length: int, follows: bool = False) -> "_State":
        """Decided for a sequence of `length` tokens."""
        return cls(control, length, length if control.k else length + control.decision.retry_in, follows)

    def after_silence(self, length: int) -> "_State":
        """Nobody had a guess about `length` tokens."""
        rest = min(self.silent // _PATIENCE, _LONGEST_REST)
        return self._replace(until=length + 1 + rest, silent=self.silent + 1)


_PATIENCE = 2
"""After each so many times without a guess the rest until the next question grows by a token, …"""
_LONGEST_REST = 15
"""… up to this. Asking in vain takes a tenth of a small model's step."""


class Speculator:
    """The proposers of one engine, and what is known of each of its sequences. Without proposers it wants nothing."""

    def __init__(
        self,
        proposers: Items[tuple[Proposer, Costs]] = (),
        *,
        max_k: int = 4,
        vocab_size: int = 0,
        fixed: bool = False,
    ):
        """proposers: each with what it is assumed to cost before that is measured, and under sampling for good.
        max_k: guesses per cycle at most. vocab_size: the target's. fixed: always guess `max_k`, for study."""
        self.max_k = max_k
        self.vocab_size = vocab_size
        self.fixed = fixed
        self._sources: tuple[_Source, ...] = ()
        self._states: dict[int, _State] = {}
        self._unsaid: dict[int, SpecDecision] = {}
        """Decisions not to begin at all, which no cycle has told of yet."""
        self._batch = 1
        """Sequences in the last step."""
        self.set_proposers(proposers)

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        """Those that have not failed."""
        return tuple(source.proposer for source in self._sources)

    def set_proposers(self, proposers: Items[tuple[Proposer, Costs]]) -> None:
        """Guess with these from now on. Every sequence begins anew with them."""
        self._states, self._unsaid = {}, {}
        self._sources = tuple(_Source(proposer, CostMeter(assumed)) for proposer, assumed in proposers)

    def fix(self, k: int) -> None:
        """From now on always guess `k` tokens, for study. Every sequence begins anew."""
        self.max_k, self.fixed = k, True
        self._states, self._unsaid = {}, {}

    def accept_rate(self, name: str) -> float | None:
        """`recent_accept_rate` of a proposer; None before its first guess, or if there is no such proposer."""
        return next((source.recent.accept_rate for source in self._sources if source.proposer.name == name), None)

    def decision(self, seq_id: int) -> SpecDecision | None:
        """How many guesses a sequence wants next, and why; None before its first step."""
        state = self._states.get(seq_id)
        return None if state is None else state.control.decision

    def forget(self, seq_id: int) -> None:
        """A sequence has ended. After an exception from this, call it again."""
        if seq_id in self._states:
            for source in self._sources:
                source.proposer.forget(seq_id)
            self._unsaid.pop(seq_id, None)
            self._states.pop(seq_id, None)

    # Before a step

    def wanted(self, sequence: Sequence) -> int:
        """How many guesses the sequence would have verified in its next step."""
        if not self._sources or not self._sources_of(sequence):
            return 0
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = self._begin(sequence)
        length = len(sequence.token_ids)
        if length < state.until:
            return 0
        k = state.control.k
        if k == 0:
            control = state.control.after_plain_tokens(length - state.since, self._costs(sequence))
            self._states[sequence.seq_id] = _State.after(control, length)
            k = control.k
        return k if self.fixed or self._can_tell(sequence) else 0

    def _can_tell(self, sequence: Sequence) -> bool:
        """Whether it is known what a step without guesses costs. The first few are made without, to learn that."""
        return not sequence.params.greedy or self._sources[0].meter.knows_a_forward

    def wanted_forks(self, sequence: Sequence) -> int:
        """How many runs of guesses beyond the first: one for each further proposer."""
        return max(0, len(self._sources_of(sequence)) - 1)

    def propose(self, plan: StepPlan, running: Mapping[int, Sequence]) -> StepDrafts:
        """Guess for the items that have room for it. No proposer's failure is raised."""
        items = [item for item in plan.items if item.num_draft_tokens]
        if not items:
            return NO_DRAFTS
        guesses = StepDrafts()
        for source in self._sources:
            asked = [item for item in items if source in self._asked(item, running)]
            if asked:
                self._ask(source, asked, running, guesses)
        guesses.total_ms = sum(guesses.ms.values())
        guesses.silent = {item.seq_id for item in items} - guesses.runs.keys()
        return guesses

    def _begin(self, sequence: Sequence) -> _State:
        control = SpeculationControl.begin(self.max_k, self._costs(sequence), fixed=self.fixed)
        state = self._states[sequence.seq_id] = _State.after(control, len(sequence.token_ids))
        if control.k == 0:
            self._unsaid[sequence.seq_id] = control.decision
        return state

    def _sources_of(self, sequence: Sequence) -> tuple[_Source, ...]:
        if sequence.drafts is None:
            return self._sources
        return tuple(source for source in self._sources if source.proposer.name in sequence.drafts)

    def _asked(self, item: PlanItem, running: Mapping[int, Sequence]) -> tuple[_Source, ...]:
        """As many of the sequence's proposers as there is room for runs."""
        return self._sources_of(running[item.seq_id])[: 1 + len(item.forks)]

    def _ask(
        self, source: _Source, items: list[PlanItem], running: Mapping[int, Sequence], guesses: StepDrafts
    ) -> None:
        """Have one proposer guess for these items."""
        requests = [self._request(source, item, running[item.seq_id]) for item in items]
        started = time.perf_counter()
        try:
            proposals = source.proposer.propose(requests)
        except ForgeError as error:
            self._lose(source, error, items, guesses)
            return
        ms = guesses.ms[source.proposer.name] = (time.perf_counter() - started) * 1e3
        longest = 0
        for item, proposal in zip(items, proposals, strict=True):
            proposal = proposal.cut(item.num_draft_tokens, self.vocab_size)
            if len(proposal):
                longest = max(longest, len(proposal))
                guesses.runs[item.seq_id] = (*guesses.runs.get(item.seq_id, ()), proposal)
                guesses.proposers[item.seq_id] = (*guesses.proposers.get(item.seq_id, ()), source.proposer.name)
        if longest:
            follows = all(self._states[item.seq_id].follows for item in items)  # else it read a text as well
            (source.meter.add_guesses if follows else source.meter.add_bound)(len(items), longest, ms)

    def _request(self, source: _Source, item: PlanItem, sequence: Sequence) -> ProposalRequest:
        return ProposalRequest(
            sequence.seq_id,
            sequence.token_ids,
            item.num_draft_tokens,
            sequence.params,
            sequence.seed,
            sequence.sample_index,
            self._sources_of(sequence).index(source) if len(self._sources) > 1 else 0,
        )

    def _lose(self, source: _Source, error: ForgeError, items: list[PlanItem], guesses: StepDrafts) -> None:
        """A proposer failed: go on without it."""
        self._sources = tuple(other for other in self._sources if other is not source)
        lease = getattr(source.proposer, "lease", None)
        failure = ProposerFailure(source.proposer.name, str(error), lease and lease.release_ms)
        for item in items:
            guesses.failures[item.seq_id] = failure

    def verify(
        self,
        sequence: Sequence,
        runs: Items[Proposal],
        logits_of_run: Callable[[int], np.ndarray],
        argmax_of_runs: Items[Items[int]],
        max_logits_of_runs: Items[Items[float]],
        wants_probabilities: bool,
    ) -> Verification:
        if sequence.params.plain_greedy and not wants_probabilities:
            return verify_likeliest(argmax_of_runs, max_logits_of_runs, runs)
        each = [logits_of_run(index) for index in range(len(runs))]
        names = sequence.seed, sequence.sample_index, sequence.num_prompt_tokens
        return verify_forks(each, runs, sequence.params, sequence.token_ids, *names)

    # After a step

    def learn(
        self,
        plan: StepPlan,
        guesses: StepDrafts,
        verified: Mapping[int, Verification],
        outcomes: Items[Outcome],
        running: Mapping[int, Sequence],
        spent: StepCost,
    ) -> SpeculationUpdate:
        """What a step's verifications teach, for `commit`. Its sequences must not have their new tokens yet."""
        nothing = guesses is NO_DRAFTS and not self._unsaid
        if nothing and not self._sources:
            return NO_UPDATE
        self._batch = len(plan.items)
        if nothing:
            if spent.num_rows == len(plan.items):
                self._meter(spent.num_rows, spent.step_ms)
            return NO_UPDATE
        started = time.perf_counter()
        cycles: list[SpecCycle] = []
        states: dict[int, _State] = {}
        for outcome in outcomes if guesses is not NO_DRAFTS else ():
            seq_id = outcome.seq_id
            if seq_id in verified:
                sequence, verification = running[seq_id], verified[seq_id]
                proposed = max(map(len, guesses.runs[seq_id]))
                control = self._states[seq_id].control
                control = control.after_cycle(proposed, verification.num_accepted, self._costs(sequence))
                length = outcome.position + len(outcome.token_ids)
                states[seq_id] = _State.after(control, length, follows=control.k > 0)
                cycles += self._cycles(outcome, guesses, verification, spent.forward_ms, control.decision)
            elif seq_id in guesses.silent:
                states[seq_id] = self._states[seq_id].after_silence(outcome.position)
            if seq_id in guesses.failures:
                cycles.append(self._failed(outcome, guesses, spent.forward_ms))
        if self._unsaid:
            cycles += self._said(plan, running, spent.forward_ms)
        if plan.execution_class == "decode":
            self._meter(spent.num_rows, spent.step_ms + (time.perf_counter() - started) * 1e3)
        return SpeculationUpdate(tuple(cycles), states)

    def _meter(self, num_rows: int, step_ms: float) -> None:
        for source in self._sources:
            source.meter.add_forward(num_rows, step_ms)

    def commit(self, update: SpeculationUpdate) -> None:
        """The step has happened."""
        self._states.update(update.states)

    def _cycles(
        self, outcome: Outcome, guesses: StepDrafts, verification: Verification, ms: float, then: SpecDecision
    ) -> list[SpecCycle]:
        """A record for each run of guesses."""
        seq_id, cycles = outcome.seq_id, []
        runs = zip(guesses.proposers[seq_id], guesses.runs[seq_id], verification.forks, strict=True)
        for fork, (proposer, proposal, verdicts) in enumerate(runs):
            won = fork == verification.winner
            accepted = sum([verdict.accepted for verdict in verdicts])
            source = next(source for source in self._sources if source.proposer.name == proposer)
            source.recent = source.recent.add(len(proposal), accepted)
            cycles.append(
                SpecCycle(
                    seq_id,
                    proposer,
                    outcome.position,
                    proposal.token_ids,
                    verdicts,
                    outcome.token_ids if won else (),
                    guesses.ms[proposer],
                    ms,
                    self._states[seq_id].control.decision,
                    then,
                    won,
                )
            )
        return cycles

    def _failed(self, outcome: Outcome, guesses: StepDrafts, ms: float) -> SpecCycle:
        """The record of guesses that were not made. What was emitted may be in another proposer's record."""
        failure = guesses.failures[outcome.seq_id]
        return SpecCycle(
            outcome.seq_id,
            failure.proposer,
            outcome.position,
            proposed=(),
            verdicts=(),
            emitted=() if outcome.seq_id in guesses.runs else outcome.token_ids,
            draft_ms=0.0,
            target_ms=ms,
            decision=self.decision(outcome.seq_id),
            won=False,
            error=failure.message,
            release_ms=failure.release_ms,
        )

    def _said(self, plan: StepPlan, running: Mapping[int, Sequence], forward_ms: float) -> list[SpecCycle]:
        """Tell of sequences of this step that were decided not to begin with."""
        cycles = []
        for item in plan.items:
            decision = self._unsaid.pop(item.seq_id, None)
            sequence = running[item.seq_id]
            if decision is not None:
                name = ", ".join(source.proposer.name for source in self._sources_of(sequence))
                length = len(sequence.token_ids)
                cycles.append(SpecCycle(item.seq_id, name, length, (), (), (), 0.0, forward_ms, decision))
        return cycles

    def _costs(self, sequence: Sequence) -> Costs:
        """What a guess by each of the sequence's proposers costs together: measured, or under sampling as assumed."""
        sources = self._sources_of(sequence)
        measured = sequence.params.greedy
        each = [source.meter.costs(self._batch) if measured else source.meter.assumed for source in sources]
        if len(each) == 1:
            return each[0]
        return Costs(sum(costs.guess for costs in each), sum(costs.row for costs in each))
