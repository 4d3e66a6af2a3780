"""From a step's logits to the tokens that its sequences get, and to which of them end with that.

Most tokens are simply the likeliest, and nobody asks how likely: those are taken from one look at the whole step's
logits. Only other rows are looked at by themselves. Logits that are no numbers end the sequence that they are of, as an
`error`, and nobody else.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np

from forge.backends.logits import Logits
from forge.engine.containers import Containers
from forge.engine.row_layout import Runs
from forge.engine.sampling import BrokenLogits, Choice, check_greatest, check_logits, choose, log_sum_exp, top_logprobs
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Outcome, PlanItem, StepPlan
from forge.speculation.speculator import StepGuesses
from forge.speculation.verification import Verification, verify_forks, verify_likeliest
from forge.trace.records import FinishReason, FinishRecord, TokenRecord

OnLogits = Callable[[int, np.ndarray], None]
"""Called with (sequence id, logits float32 `[vocab]`) before a choice. The array is the callee's to keep."""


class Choices:
    """What one step brings its sequences. Until it is committed nothing but their text and log probabilities know."""

    def __init__(
        self, among: Containers, eos_token_ids: frozenset[int], on_logits: OnLogits | None, probabilities: bool
    ):
        """`probabilities`: whether every token's probability is wanted."""
        self._among, self._eos_token_ids = among, eos_token_ids
        self._on_logits, self._probabilities = on_logits, probabilities
        self.tokens: list[TokenRecord] = []
        self.finished: list[FinishRecord] = []
        self.outcomes: list[Outcome] = []
        self.verified: dict[int, Verification] = {}

    def choose(
        self,
        plan: StepPlan,
        guesses: StepGuesses,
        logits: Logits | None,
        likeliest: list[int],
        greatest: list[float],
    ) -> None:
        """Choose the next tokens of every item that samples.

        `logits` has the rows of all items, in order. Of each row `likeliest` is the token with the greatest logit (or
        the first NaN), and `greatest` that logit.
        """
        running, outcomes, first_row = self._among.running, self.outcomes, 0
        for item in plan.items:
            row = first_row + len(item.logit_rows) - item.num_guesses - 1  # that of the last known token
            sequence = running.get(item.seq_id)
            if sequence is None:  # it ended after this step was planned ahead: nobody wants its row
                first_row = row + 1
                continue
            runs = guesses.runs.get(item.seq_id, ()) if item.num_guesses else ()
            try:
                if sequence.needs_prompt_logprobs:
                    self._score_prompt(sequence, item.start + item.logit_rows.start, logits[first_row : row + 1])
                if runs:
                    outcome = self._verified(item, runs, row, logits, likeliest, greatest)
                elif item.samples:
                    forked = [self._next_token(fork, logits, row, likeliest, greatest) for fork in sequence.forks]
                    outcome = self._next_token(sequence, logits, row, likeliest, greatest)
                    outcome = outcome._replace(forked=tuple(forked)) if forked else outcome
                elif item.remaining:
                    outcome = Outcome(item.seq_id, len(sequence.token_ids), (), None)
                else:
                    outcome = self._ended(sequence, "length")
            except BrokenLogits as error:
                forked = [self._broken(fork, error) for fork in sequence.forks] if item.samples else ()
                outcome = self._broken(sequence, error)._replace(forked=tuple(forked))
            outcomes.append(outcome)
            first_row = row + sum([len(run) + 1 for run in runs]) if runs else row + 1
        for seq_id in plan.exhausted:
            outcomes.append(self._ended(self._among.find(seq_id), "length"))

    def _next_token(
        self, sequence: Sequence, logits: Logits, row: int, likeliest: list[int], greatest: list[float]
    ) -> Outcome:
        """Choose a sequence's next token from row `row`."""
        if not self._is_plain(sequence):
            params, length = sequence.params, len(sequence.token_ids)
            own = logits[row]
            names = sequence.seed, sequence.sample_index, length
            (row_logits,) = self._before_minimum(sequence, own[None])
            history = sequence.token_ids
            choice = choose(row_logits, params, history, *names, sequence.num_prompt_tokens, self._probabilities)
            return self._emit(sequence, (choice,), (own,))
        check_greatest(greatest[row])
        own = None if self._on_logits is None else logits[row]
        return self._emit(sequence, ((likeliest[row], None, None),), (own,))  # making a `Choice` takes as long as that

    def _verified(
        self,
        item: PlanItem,
        runs: Runs,
        first_row: int,
        logits: Logits,
        likeliest: list[int],
        greatest: list[float],
    ) -> Outcome:
        """Decide about an item's runs of guesses, whose rows begin at `first_row`."""
        sequence, spans = self._among.running[item.seq_id], []
        for run in runs:
            spans.append(slice(first_row, first_row + len(run) + 1))
            first_row = spans[-1].stop
        if self._is_plain(sequence):
            found = verify_likeliest([likeliest[span] for span in spans], [greatest[span] for span in spans], runs)
            rows = [None] * len(found.choices) if self._on_logits is None else logits[spans[found.winner]]
        else:
            each = [self._before_minimum(sequence, logits[span]) for span in spans]
            names = sequence.seed, sequence.sample_index, sequence.num_prompt_tokens
            found = verify_forks(each, runs, sequence.params, sequence.token_ids, *names)
            rows = each[found.winner]
        self.verified[item.seq_id] = found
        outcome = self._emit(sequence, found.choices, rows)
        # Where the sequence ended on a guess, that guess counts as its last token, whose keys nobody needs.
        num_accepted = min(found.num_accepted, len(outcome.token_ids) - 1)
        winner = item.forks[found.winner - 1].seq_id if found.winner else None
        return outcome._replace(num_accepted=num_accepted, winner=winner)

    def _before_minimum(self, sequence: Sequence, rows: np.ndarray) -> np.ndarray:
        """Logits of a sequence's next tokens, without those tokens that would end it before its `min_tokens`."""
        params = sequence.params
        num_rows = params.min_tokens - sequence.num_output_tokens
        if num_rows <= 0:
            return rows
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        rows = rows.copy()
        rows[:num_rows, list(ends)] = -np.inf
        return rows

    def _is_plain(self, sequence: Sequence) -> bool:
        """Whether a sequence's tokens are the likeliest, and nobody asks how likely they were."""
        return sequence.params.plain_greedy and not self._probabilities

    def _emit(self, sequence: Sequence, chosen: Items[Choice], rows: Items[np.ndarray | None]) -> Outcome:
        """Take the tokens chosen, each from its row of logits (None where nobody looks at one), up to the one that ends
        the sequence."""
        token_ids: list[int] = []
        seq_id, output_text, position = sequence.seq_id, sequence.output_text, len(sequence.token_ids)
        params = sequence.params
        last = sequence.num_prompt_tokens + sequence.max_output_tokens - 1
        for (token_id, probability, logprobs), logits in zip(chosen, rows, strict=False):
            if self._on_logits is not None:
                self._on_logits(seq_id, logits.copy())
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            is_end = (token_id in self._eos_token_ids and not params.ignore_eos) or token_id in params.stop_token_ids
            text = "" if is_end and not params.include_stop_str_in_output else output_text.push(token_id)
            token_ids.append(token_id)
            self.tokens.append(TokenRecord(seq_id, position, token_id, text, probability, logprobs))
            if is_end:
                return self._ended(sequence, "stop", token_id, tuple(token_ids))
            if output_text.stopped_by is not None:
                return self._ended(sequence, "stop", output_text.stopped_by, tuple(token_ids))
            if position >= last:
                return self._ended(sequence, "length", None, tuple(token_ids))
            position += 1
        return Outcome(seq_id, len(sequence.token_ids), tuple(token_ids), None)

    def _ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop: str | int | None = None,
        token_ids: tuple[int, ...] = (),
        error: str | None = None,
    ) -> Outcome:
        """The sequence ends with these tokens. EOS or a stop string on the last allowed one is a `stop`."""
        text = sequence.output_text.finish()
        if reason == "length" and sequence.output_text.stopped_by is not None:  # completed by the last bytes
            reason, stop = "stop", sequence.output_text.stopped_by
        self.finished.append(FinishRecord(sequence.seq_id, reason, text, stop, error))
        return Outcome(sequence.seq_id, len(sequence.token_ids), token_ids, reason, stop)

    def _broken(self, sequence: Sequence, error: BrokenLogits) -> Outcome:
        """A sequence ends because its logits are no numbers."""
        sequence.note(str(error))
        return self._ended(sequence, "error", error=str(error))

    def _score_prompt(self, sequence: Sequence, position: int, rows: np.ndarray) -> None:
        """Log probabilities of prompt tokens given those before them. `rows` are the logits after the tokens from
        `position` on; those of the last one are about the output."""
        wanted, scores = sequence.params.prompt_logprobs, sequence.prompt_logprobs
        if not scores:
            scores.append(None)  # nothing precedes the first token
        for logits in rows[: sequence.num_prompt_tokens - 1 - position]:
            position += 1
            if position == len(scores):
                log_total = log_sum_exp(logits, float(logits[check_logits(logits)]))
                scores.append(top_logprobs(logits, log_total, wanted, sequence.token_ids[position]))
