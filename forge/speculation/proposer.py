"""The seam of speculation: whoever guesses the next tokens of a sequence.

A guess costs little to make and little to check, and whether it is right changes the time and never the tokens. So a
proposer may be wrong, and may propose fewer tokens than it was asked for, or none.

Nothing is told to a proposer about what became of its proposals. Each request brings the sequence's tokens, and what a
proposer remembers of the sequence counts only as far as it agrees with them. So a rejection, a preemption or an
exception anywhere (Ctrl-C) needs no message, and none can be lost.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from forge.engine.sampling import Distribution
from forge.engine.sampling_params import SamplingParams
from forge.speculation.leases import Lease


@dataclass(frozen=True)
class ProposalRequest:
    """Guess what follows `token_ids`."""

    seq_id: int
    token_ids: Sequence[int]
    """Prompt and output so far, at least one token. The caller's own: to be read before `propose` returns."""
    max_tokens: int
    """K: how many to propose at most; may be 0."""
    params: SamplingParams
    seed: int
    sample_index: int
    branch: int = 0
    """Which of several proposers this is, where several guess for one sequence: their draws must differ."""


@dataclass(frozen=True)
class Proposal:
    """The tokens guessed, in order, and the odds at which each was drawn."""

    token_ids: tuple[int, ...] = ()
    distributions: tuple[Distribution, ...] | None = None
    """What each token was drawn from. None if they were not drawn: a guess without odds, which verification takes as
    certain (q = 1)."""

    def __post_init__(self) -> None:
        if self.distributions is not None and len(self.distributions) != len(self.token_ids):
            raise ValueError(f"{len(self.distributions)} distributions for {len(self.token_ids)} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, max_tokens: int, vocab_size: int) -> "Proposal":
        """At most the first `max_tokens`, ending before the first that is no token of the target's vocabulary."""
        ids = self.token_ids[:max_tokens]
        outside = next((index for index, token_id in enumerate(ids) if not 0 <= token_id < vocab_size), len(ids))
        if outside == len(self):
            return self
        return Proposal(ids[:outside], self.distributions and self.distributions[:outside])


NO_PROPOSAL = Proposal()


class Proposer(ABC):
    """Guesses for the sequences of one engine, which are known by its ids."""

    name: str
    """What `--speculate` or the model calls it."""
    lease: Lease | None = None
    """What it guesses with, where that is lent to it."""

    @abstractmethod
    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal per request, in order, each of at most its `max_tokens`.

        A request's tokens decide its proposal, whatever stands beside it. Raises `LeaseRevoked` if what it guesses
        with was taken away; every other call may still be made then.
        """

    def forget(self, seq_id: int) -> None:  # noqa: B027 (optional: not every proposer remembers)
        """Drop what is remembered of a sequence, if anything is: it ended, or somebody needs the room."""
