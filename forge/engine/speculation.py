"""The interface of speculation: what the scheduler and the engine ask of it, in this order in a step.

    schedule() with wanted() ─▶ propose() ─▶ forward ─▶ verify() ─▶ learn() ─▶ commit()

`forge.speculation` implements it; the engine imports nothing of that.
"""

from collections.abc import Sequence as Items
from typing import Protocol

from forge.engine.proposer import Proposal, Proposer, StepDrafts, Verification
from forge.engine.sampler import LaunchedStep, StepLogits, StepResults
from forge.engine.sequence import Sequence
from forge.engine.step_plan import StepPlan


class Speculation(Protocol):
    """What the scheduler and the engine need of speculation: `forge.speculation.speculator.Speculator`."""

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        """The proposers in use."""

    def wanted(self, sequence: Sequence) -> int:
        """Return how many draft tokens the sequence should have verified in its next step, at most."""

    def wanted_forks(self, sequence: Sequence) -> int:
        """Return the number of drafts beyond the first: one for each further proposer."""

    def propose(self, plan: StepPlan) -> StepDrafts:
        """Propose draft tokens for the plan's items that have slots for them. Never raises a proposer's error: a
        sequence that loses its proposer notes why (`Sequence.add_error`)."""

    def verify(
        self,
        sequence: Sequence,
        proposals: Items[Proposal],
        logits: StepLogits,
        spans: Items[slice],
        wants_probabilities: bool,
    ) -> Verification:
        """Decide which draft tokens of a sequence stand. It must not have its new tokens yet.

        spans: for each proposal of K tokens the K + 1 rows of `logits` after the sequence's last token and after each
        draft token; they are not read where the argmax decides. wants_probabilities: fill in the tokens' probabilities.
        Raises `BrokenLogits` if a row that is needed holds a NaN or +infinity.
        """

    def learn(self, step: LaunchedStep, results: StepResults, seconds: float) -> None:
        """Take over what a step's verifications and times teach, and note in `results` the cycles, and who had no draft
        tokens. Called once the step's tokens are decided, `seconds` after it began, before the sequences have them."""

    def forget(self, seq_id: int) -> None:
        """Drop the state of a sequence, which has ended. After an exception from this, call it again."""
