"""Speculation in the engine: which proposers draft for which sequence, how many tokens, and what is learned from that.

    wanted() ─▶ the scheduler reserves slots ─▶ propose() ─▶ one forward ─▶ verify() ─▶ learn() ─▶ SpecCycle

How many draft tokens a sequence wants is decided sequence by sequence (`controller`), by times measured here (`costs`).
The output never depends on it: a draft token stands only if the target chooses it there. The acceptance rule
`rejection` is the exception (`verification`): under sampling its tokens can be reproduced only with `fixed`.

A proposer that fails (its lease was revoked, its logits are not finite) is left out from then on, the cycle says why,
and the target goes on alone or with the other proposers. New ones can be set at any time between two steps.

The state of a sequence is one value, replaced once its step has happened: an exception anywhere leaves either the old
one or the new one, and both are right.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

from forge.engine.proposer import (
    NO_DRAFTS,
    Proposal,
    ProposalRequest,
    Proposer,
    ProposerFailure,
    StepDrafts,
    Verification,
)
from forge.engine.sampler import LaunchedStep, StepLogits, StepResults
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Outcome, PlanItem, StepPlan
from forge.engine.structured_output import Matcher
from forge.errors import ForgeError
from forge.speculation.controller import CostMeter, Costs, SpeculationControl
from forge.speculation.leases import LeaseRevoked
from forge.speculation.verification import Acceptance, verify_argmax, verify_drafts
from forge.trace.records import SpecCycle, SpecDecision, Undrafted

_SILENCES_PER_TOKEN = 2
"""After this many requests in a row without a proposal, the wait before the next request grows by one output token."""
_MAX_WAIT = 15
"""Output tokens. A request without a proposal takes a tenth of a small model's step."""


class _State(NamedTuple):
    """The draft length of one sequence, and what decides it."""

    control: SpeculationControl
    until: int
    """Tokens before which it wants nothing."""
    follows: bool = False
    """Its proposers have seen all but its last few tokens."""
    silent: int = 0
    """Requests in a row for which no proposer had a proposal."""

    @classmethod
    def after(cls, control: SpeculationControl, length: int, follows: bool = False) -> "_State":
        """Return the state with the decision for a sequence of `length` tokens."""
        return cls(control, length + (control.decision.retry_in or 0), follows)

    def after_silence(self, length: int) -> "_State":
        """Return the state after no proposer had a proposal at `length` tokens."""
        wait = min(self.silent // _SILENCES_PER_TOKEN, _MAX_WAIT)
        return self._replace(until=length + 1 + wait, silent=self.silent + 1)


class Speculator:
    """`Speculation` with proposers: asks them, verifies their tokens, and adapts how many it asks for."""

    def __init__(
        self,
        proposers: Items[tuple[Proposer, Costs]] = (),
        *,
        max_k: int = 4,
        vocab_size: int = 0,
        fixed: bool = False,
        acceptance: Acceptance = "gumbel",
    ):
        """proposers: each with its assumed costs, which hold until they are measured. max_k: draft tokens per cycle at
        most. vocab_size: the target's. fixed: always ask for `max_k`. acceptance: the rule of `verification`."""
        self.max_k, self.vocab_size, self.fixed = max_k, vocab_size, fixed
        self.acceptance: Acceptance = acceptance
        self.proposers: tuple[Proposer, ...] = tuple(proposer for proposer, _ in proposers)
        """Those that have not failed."""
        self._meters = {proposer.name: CostMeter(assumed) for proposer, assumed in proposers}
        if len(self._meters) < len(proposers):
            raise ValueError("two proposers have the same name")
        self._states: dict[int, _State] = {}
        self._wishes: dict[int, int | Undrafted] = {}
        """By sequence id: how many draft tokens it wants in its next step, or why none."""
        self._batch = 1
        """Sequences in the last step."""

    def fix(self, k: int) -> None:
        """Request `k` tokens in every cycle from now on, for study. Every sequence begins anew."""
        self.max_k, self.fixed = k, True
        self._states = {}

    def decision(self, seq_id: int) -> SpecDecision | None:
        """Return how many draft tokens a sequence wants next, and why; None before its first step."""
        state = self._states.get(seq_id)
        return None if state is None else state.control.decision

    def forget(self, seq_id: int) -> None:
        """Drop the state of a sequence that has ended. After an exception from this, call it again."""
        if seq_id in self._states:
            for proposer in self.proposers:
                proposer.forget(seq_id)
            self._states.pop(seq_id, None)
        self._wishes.pop(seq_id, None)

    # Before the forward

    def wanted(self, sequence: Sequence) -> int:
        """Return how many draft tokens the sequence should have verified in its next step, at most."""
        wish = self._wishes[sequence.seq_id] = self._wish(sequence)
        return 0 if isinstance(wish, Undrafted) else wish

    def _wish(self, sequence: Sequence) -> int | Undrafted:
        """Return how many draft tokens to request, at least one, or why none."""
        seq_id = sequence.seq_id
        if not self._proposers_of(sequence):
            return Undrafted(seq_id, "not_wanted")
        state, length = self._states.get(seq_id), len(sequence.token_ids)
        if state is None:
            most = sequence.params.num_speculative_tokens
            max_k = self.max_k if most is None else min(most, self.max_k)
            control = SpeculationControl.begin(max_k, self._costs(sequence), fixed=self.fixed)
            state = self._states[seq_id] = _State.after(control, length)
        if length < state.until:
            left = state.until - length
            if state.control.k:
                return Undrafted(seq_id, "pauses", left)
            return Undrafted(seq_id, "off", left, state.control.decision)
        if not state.control.k:
            state = self._states[seq_id] = _State.after(state.control.probing(self._costs(sequence)), length)
        # The first steps have no draft tokens: they show what a plain one costs.
        left = 0 if self.fixed else self._meters[self.proposers[0].name].plain_forwards_left
        return Undrafted(seq_id, "measures", left) if left else state.control.k

    def wanted_forks(self, sequence: Sequence) -> int:
        """Return the number of drafts beyond the first: one for each further proposer."""
        return max(0, len(self._proposers_of(sequence)) - 1)

    def propose(self, plan: StepPlan) -> StepDrafts:
        """Propose draft tokens for the plan's items that have slots for them. Never raises a proposer's error."""
        items = [item for item in plan.items if item.num_draft_slots]
        if not items:
            return NO_DRAFTS
        drafts = StepDrafts()
        for proposer in self.proposers:
            # As many of a sequence's proposers as the plan has slots for.
            mine = [item for item in items if proposer in self._proposers_of(item.sequence)[: 1 + len(item.forks)]]
            if mine:
                self.ask(proposer, mine, drafts)
        drafts.total_ms = sum(drafts.ms.values())
        return drafts

    def _proposers_of(self, sequence: Sequence) -> tuple[Proposer, ...]:
        params = sequence.params
        if params.num_speculative_tokens == 0:
            return ()
        if params.drafts is None:
            return self.proposers
        return tuple(proposer for proposer in self.proposers if proposer.name in params.drafts)

    def ask(self, proposer: Proposer, items: list[PlanItem], drafts: StepDrafts) -> None:
        """Add one proposer's draft tokens for these items. If it fails, go on without it."""
        name, meter = proposer.name, self._meters[proposer.name]
        requests = [self._request(proposer, item) for item in items]
        started = time.perf_counter()
        try:
            proposals = proposer.propose(requests)
        except ForgeError as error:
            self.proposers = tuple(kept for kept in self.proposers if kept is not proposer)
            release_ms = error.release_ms if isinstance(error, LeaseRevoked) else None
            for item in items:
                item.sequence.add_error(str(error))
                drafts.failures[item.seq_id] = ProposerFailure(name, str(error), release_ms)
            return
        ms = drafts.ms[name] = (time.perf_counter() - started) * 1e3
        longest = 0
        for item, proposal in zip(items, proposals, strict=True):
            proposal = replace(proposal, proposer=name).cut(item.num_draft_slots, self.vocab_size)
            if item.sequence.matcher is not None and len(proposal):
                proposal = _without_refused(proposal, item.sequence.matcher, item.sequence.output_token_ids)
            if len(proposal):
                longest = max(longest, len(proposal))
                drafts.proposals[item.seq_id] = (*drafts.proposals.get(item.seq_id, ()), proposal)
        if longest:
            follows = all(self._states[item.seq_id].follows for item in items)  # else it read a text as well
            (meter.add_proposal if follows else meter.add_bound)(len(items), longest, ms)

    def _request(self, proposer: Proposer, item: PlanItem) -> ProposalRequest:
        branch, independent = self._proposers_of(item.sequence).index(proposer), self.acceptance == "rejection"
        return ProposalRequest(item.seq_id, item.sequence.draw, item.num_draft_slots, branch, independent)

    # After the forward

    def verify(
        self,
        sequence: Sequence,
        proposals: Items[Proposal],
        logits: StepLogits,
        spans: Items[slice],
        wants_probabilities: bool,
    ) -> Verification:
        """Decide which draft tokens of a sequence stand; see `Speculation.verify`."""
        if sequence.params.plain_greedy and not wants_probabilities:
            max_logits = [logits.max_logit[span] for span in spans]
            return verify_argmax([logits.argmax[span] for span in spans], max_logits, proposals)
        rows = [logits.rows[span] for span in spans]
        return verify_drafts(rows, proposals, sequence.draw, wants_probabilities, self.acceptance)

    def learn(self, step: LaunchedStep, results: StepResults, seconds: float) -> None:
        """Take over what a step's verifications and times teach. The sequences must not have their new tokens yet."""
        started, plan, drafts = time.perf_counter(), step.plan, step.drafts
        cycles: list[SpecCycle] = []
        self._batch = len(plan.items) or self._batch
        outcome_of = {outcome.seq_id: outcome for outcome in results.outcomes}
        for item in plan.items if drafts is not NO_DRAFTS else ():
            seq_id, outcome = item.seq_id, outcome_of[item.seq_id]
            decision = self.decision(seq_id)
            verification = results.verified.get(seq_id)
            if verification is not None:
                proposed, accepted = max(map(len, drafts.proposals[seq_id])), verification.num_accepted
                control = self._states[seq_id].control.after_cycle(proposed, accepted, self._costs(item.sequence))
                end = outcome.position + len(outcome.token_ids)
                self._states[seq_id] = _State.after(control, end, follows=True)
                cycles += _cycles(outcome, step, verification, decision, control.decision)
            elif item.num_draft_slots and seq_id not in drafts.proposals:
                self._states[seq_id] = self._states[seq_id].after_silence(outcome.position)
            if seq_id in drafts.failures:
                cycles.append(_failed(outcome, step, decision))
        num_rows = step.batch.num_rows if step.batch is not None else 0
        is_decode = num_rows == len(plan.items) if drafts is NO_DRAFTS else plan.execution_class == "decode"
        if is_decode and num_rows:
            step_ms = (seconds + time.perf_counter() - started) * 1e3 - drafts.total_ms
            for meter in [self._meters[proposer.name] for proposer in self.proposers]:
                meter.add_forward(num_rows, step_ms)
        drafted = drafts.proposals.keys() | drafts.failures.keys()
        decoded = [item for item in plan.items if item.phase == "decode" and item.seq_id not in drafted]
        results.cycles, results.undrafted = tuple(cycles), tuple(map(self._why_undrafted, decoded))

    def _why_undrafted(self, item: PlanItem) -> Undrafted:
        """Return why a sequence of this step was decoded without draft tokens."""
        wish = self._wishes.get(item.seq_id)
        if isinstance(wish, Undrafted):
            return wish
        if item.num_draft_slots:
            return Undrafted(item.seq_id, "no_proposal")
        left = item.sequence.max_output_tokens - item.sequence.num_output_tokens
        return Undrafted(item.seq_id, "last_token" if left <= 1 else "no_room")

    def _costs(self, sequence: Sequence) -> Costs:
        """Return what a draft token costs, by all of the sequence's proposers together."""
        costs = [self._meters[proposer.name].costs(self._batch) for proposer in self._proposers_of(sequence)]
        return Costs(sum(cost.token for cost in costs), sum(cost.row for cost in costs))


def _cycles(
    outcome: Outcome, step: LaunchedStep, verification: Verification, decision: SpecDecision | None, then: SpecDecision
) -> Iterator[SpecCycle]:
    """Yield a record for each draft of a sequence."""
    seq_id, start, drafts = outcome.seq_id, outcome.position, step.drafts
    for draft, (proposal, verdicts) in enumerate(zip(drafts.proposals[seq_id], verification.by_draft, strict=True)):
        name, won = proposal.proposer, draft == verification.winner
        emitted, ms = outcome.token_ids if won else (), (drafts.ms[name], step.forward_ms)
        cycle = SpecCycle(seq_id, name, start, proposal.token_ids, verdicts, emitted, *ms, decision, then, won)
        yield replace(cycle, draft_cached=proposal.cached)


def _failed(outcome: Outcome, step: LaunchedStep, decision: SpecDecision | None) -> SpecCycle:
    """Record a proposer's failure. What was emitted may be in another proposer's record."""
    name, message, release_ms = step.drafts.failures[outcome.seq_id]
    emitted = () if outcome.seq_id in step.drafts.proposals else outcome.token_ids
    cycle = SpecCycle(outcome.seq_id, name, outcome.position, (), (), emitted, 0.0, step.forward_ms, decision)
    return replace(cycle, won=False, error=message, release_ms=release_ms)


def _without_refused(proposal: Proposal, matcher: Matcher, output: Items[int]) -> Proposal:
    """Return the draft tokens up to the first that the grammar refuses.

    Where they were drawn from distributions, that one stays: the rule `rejection` must see it rejected. Left out, it
    would make a plain draw of what has to be a draw from what it leaves of p, and the result would be biased.
    """
    num_allowed = matcher.num_allowed(output, proposal.token_ids)
    return proposal.first(num_allowed if proposal.distributions is None else num_allowed + 1)
