"""The sampler: from a step's logits to the tokens that its sequences get, and to which of them end with that.

A greedy token without log probabilities is read from one argmax over the whole step's logits. Only other rows are
looked at one by one. Logits that are not numbers end the sequence that they belong to, as an `error`, and no other.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from forge.engine.proposer import Proposal, StepDrafts, Verification
from forge.engine.readout import SeparateResult, read_out, store_readout
from forge.engine.sampling import BrokenLogits, SampledToken, check_max_logit, choose
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Outcome, PlanItem, StepPlan
from forge.engine.structured_output import MatcherError
from forge.engine.task import GENERATE, Readout
from forge.model.forward_batch import ForwardBatch
from forge.model.model import Logits
from forge.reasons import FinishReason
from forge.trace.records import FinishRecord, SpecCycle, TokenRecord, Undrafted

OnLogits = Callable[[int, np.ndarray], None]
"""Called with (sequence id, logits float32 `[vocab]`) before a token is chosen. The callee owns the array."""


@dataclass
class LaunchedStep:
    """A step from the launch of its forward pass until its record is built."""

    plan: StepPlan
    drafts: StepDrafts
    batch: ForwardBatch | None
    logits: Logits
    separate: list[SeparateResult]
    schedule_ms: float
    """Until the forward began, building the batch and moving blocks included, without the time of proposers."""
    forward_ms: float
    """Until the model returned. Async scheduling adds the time that the host then waited for the device."""
    sample_ms: float = 0.0
    """Until all tokens were known."""


@dataclass
class StepLogits:
    """A step's logits with the argmax of every row, counted from the batch's first logit row."""

    rows: Logits
    argmax: list[int]
    """The token with the greatest logit, or the first NaN."""
    max_logit: list[float]
    sampled: bool = False
    """Async scheduling: the device chose the tokens, and `argmax` and `max_logit` are those and their logits."""

    @classmethod
    def of(cls, rows: Logits) -> "StepLogits":
        return cls(rows, *argmax_rows(rows), sampled=not isinstance(rows, np.ndarray) and rows.sampled)


@dataclass
class StepResults:
    """The results of one step: `outcomes` for the scheduler, `verified` for the proposers, the rest for the record.

    Until `commit()` neither scheduler nor cache sees them, and no `token_ids` grow.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    tokens: list[TokenRecord] = field(default_factory=list)
    finished: list[FinishRecord] = field(default_factory=list)
    verified: dict[int, Verification] = field(default_factory=dict)
    """By sequence id: the decision about its draft tokens."""
    cycles: tuple[SpecCycle, ...] = ()
    undrafted: tuple[Undrafted, ...] = ()
    """Who had no draft tokens, and why."""


@dataclass
class Sampler:
    """Chooses the next tokens of one step, and reads out what prefill-only sequences asked for. Made for each step."""

    _eos_token_ids: frozenset[int]
    _verify: Callable[[Sequence, tuple[Proposal, ...], StepLogits, Items[slice], bool], Verification] | None
    """`Speculation.verify`."""
    _on_logits: Items[OnLogits] = ()
    _report_probabilities: bool = False
    """Fill in every token's probability, which takes longer than a greedy choice."""
    _results: StepResults = field(default_factory=StepResults)

    def sample(self, step: LaunchedStep) -> StepResults:
        """Choose the next tokens of every item that needs some, and end the plan's exhausted sequences.

        The logits are the rows of all items, in order: of an item those of its known tokens, then those of its drafts.
        """
        plan, drafts, results = step.plan, step.drafts, self._results
        logits, end = StepLogits.of(step.logits), 0
        for item in plan.items:
            first_row, end = end, end + len(item.logit_rows) - item.num_draft_slots  # known tokens: of a decode one
            proposals = drafts.proposals.get(item.seq_id, ()) if item.num_draft_slots else ()
            if item.sequence.finish_reason is None:  # else it ended after this step was planned ahead
                results.outcomes += self._outcomes(item, proposals, logits, first_row, end)
            if proposals:  # each draft's rows begin with one for the last known token; the first's is counted above
                end += sum([len(proposal) + 1 for proposal in proposals]) - 1
        for item, result in zip(plan.separate, step.separate, strict=True):
            results.outcomes += self._separate_outcomes(item, result)
        for sequence in plan.exhausted:
            results.outcomes += self._all_ended(sequence, "length")
        return results

    def _outcomes(
        self,
        item: PlanItem,
        proposals: tuple[Proposal, ...],
        logits: StepLogits,
        first_row: int,
        end: int,
        readout: Readout | None = None,
    ) -> Items[Outcome]:
        """Compute an item's outcome. The outcomes of the samples whose prompt it has computed follow.

        A generation gets its next token, or those that stand of its drafts. A task is answered from the item's rows,
        and its sequence ends unless it asks for a token too. A prompt in chunks goes on, with no token yet.

        The rows of its known tokens in `logits` go from `first_row` up to `end`, and those of its draft tokens follow.
        readout: the answer to its task, where separate forwards gave it.
        """
        sequence, row = item.sequence, end - 1
        try:
            if proposals:
                return [self.verify(item, proposals, logits, row)]
            if sequence.task is not GENERATE and sequence.readout is None:
                store_readout(item, readout or read_out(item, np.asarray(logits.rows[first_row:end])))
            if item.chooses_token:
                if not sequence.waiting_samples:
                    return (self._next_token(sequence, logits, row),)
                return [self._next_token(sample, logits, row) for sample in (sequence, *sequence.waiting_samples)]
            if item.remaining:
                return [Outcome(item.seq_id, len(sequence.token_ids), (), None)]
            return self._all_ended(sequence, "length" if sequence.params.max_tokens == 0 else "stop")
        except (BrokenLogits, MatcherError) as error:
            return self._all_ended(sequence, "error", error)

    def _next_token(self, sequence: Sequence, logits: StepLogits, row: int) -> Outcome:
        """Choose a sequence's next token from one row."""
        if logits.sampled or (sequence.params.plain_greedy and not self._report_probabilities):
            if not math.isfinite(logits.max_logit[row]):
                check_max_logit(logits.max_logit[row])  # raises; the rows may have been released
            return self._emit(sequence, ((logits.argmax[row], None, None),), logits, row)  # faster than `SampledToken`
        token = choose(logits.rows[row], sequence.draw, self._report_probabilities, logits.argmax[row])
        return self._emit(sequence, (token,), logits, row)

    def _emit(
        self, sequence: Sequence, tokens: Items[SampledToken | tuple[int, None, None]], logits: StepLogits, row: int
    ) -> Outcome:
        """Give a sequence tokens until it ends, the first chosen from this row and each other from the next.

        Its text and log probabilities change here; `token_ids` follow when the step is committed. After an interruption
        in between `rebuild_text` undoes what changed.
        """
        token_ids: list[int] = []
        params = sequence.params
        seq_id, output_text, position = sequence.seq_id, sequence.output_text, len(sequence.token_ids)
        last = sequence.num_prompt_tokens + sequence.max_output_tokens - 1
        for index, (token_id, probability, logprobs) in enumerate(tokens):
            for on_logits in self._on_logits:
                on_logits(seq_id, logits.rows[row + index].copy())
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            is_end = token_id in self._eos_token_ids and not params.ignore_eos
            if params.stop_token_ids:
                is_end = is_end or token_id in params.stop_token_ids
            text = "" if is_end and not params.include_stop_str_in_output else output_text.push(token_id)
            token_ids.append(token_id)
            self._results.tokens.append(TokenRecord(seq_id, position, token_id, text, probability, logprobs))
            if is_end:
                return self._ended(sequence, "stop", token_id, tuple(token_ids))
            if output_text.stopped_by is not None:
                return self._ended(sequence, "stop", output_text.stopped_by, tuple(token_ids))
            if position >= last:
                return self._ended(sequence, "length", None, tuple(token_ids))
            position += 1
        return Outcome(seq_id, len(sequence.token_ids), tuple(token_ids), None)

    def _separate_outcomes(self, item: PlanItem, result: SeparateResult) -> Items[Outcome]:
        """Compute the outcomes of an item from its separate forwards."""
        if result.error is not None:
            return self._all_ended(item.sequence, "error", result.error)
        return self._outcomes(item, (), StepLogits.of(result.last_row), 0, len(result.last_row), result.readout)

    def verify(self, item: PlanItem, proposals: tuple[Proposal, ...], logits: StepLogits, row: int) -> Outcome:
        """Decide which draft tokens of an item stand; the rows of its drafts begin at that of its last known token."""
        assert self._verify is not None, "what has draft tokens has proposers"
        sequence, spans = item.sequence, []
        for proposal in proposals:
            spans.append(slice(row, row + len(proposal) + 1))
            row = spans[-1].stop
        verification = self._verify(sequence, proposals, logits, spans, self._report_probabilities)
        self._results.verified[item.seq_id] = verification
        outcome = self._emit(sequence, verification.sampled, logits, spans[verification.winner].start)
        # Where the sequence ended on a draft token, that one counts as its last token, whose keys are not needed.
        num_accepted = min(verification.num_accepted, len(outcome.token_ids) - 1)
        winner = item.forks[verification.winner - 1].seq_id if verification.winner else None
        return outcome._replace(num_accepted=num_accepted, winner=winner)

    def _ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop: str | int | None = None,
        token_ids: tuple[int, ...] = (),
        error: Exception | None = None,
    ) -> Outcome:
        """Return the outcome of a sequence that ends with these tokens, and note that for the record. EOS or a stop
        string on the last allowed one is a `stop`. The scheduler ends the sequence, at `commit()`."""
        text = sequence.output_text.finish()
        if reason == "length" and sequence.output_text.stopped_by is not None:  # completed by the last bytes
            reason, stop = "stop", sequence.output_text.stopped_by
        why = sequence.length_limit if reason == "length" else None
        message, by_request = None if error is None else str(error), isinstance(error, MatcherError)
        self._results.finished.append(FinishRecord(sequence.seq_id, reason, text, stop, message, by_request, why))
        return Outcome(sequence.seq_id, len(sequence.token_ids), token_ids, reason, stop)

    def _all_ended(
        self, sequence: Sequence, reason: FinishReason, error: BrokenLogits | MatcherError | None = None
    ) -> list[Outcome]:
        """End a sequence without another token, and the samples that wait in it. error: logits that are not numbers, or
        a grammar that needs too much work."""
        outcomes = []
        for sample in (sequence, *sequence.waiting_samples):
            sample.length_limit = sequence.length_limit
            if error is not None:
                sample.readout = None
                sample.add_error(str(error))
            outcomes.append(self._ended(sample, reason, error=error))
        return outcomes


def argmax_rows(logits: Logits) -> tuple[list[int], list[float]]:
    """Return each row's argmax (the lowest id of equals, or the first NaN) and its logit."""
    if not isinstance(logits, np.ndarray):
        return logits.argmax_rows()
    token_ids = [int(row.argmax()) for row in logits]  # argmax(axis=1) would copy rows that lie apart
    return token_ids, [float(row[token_id]) for row, token_id in zip(logits, token_ids, strict=True)]
