"""The interface of proposers.

A proposer proposes draft tokens: what a sequence may say next. The target model verifies them in its next forward, so a
wrong draft token costs time and never changes the output. A proposer may be wrong, and may propose fewer tokens than it
was asked for, or none.

A proposer is never told what became of its proposals. Each request brings the sequence's tokens, and a proposer trusts
its own state only as far as that agrees with them. So a rejection, a preemption or an exception needs no message.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from forge.engine.sampling import Distribution, SampledToken
from forge.model.model import Draw
from forge.trace.records import TokenVerdict


@dataclass(frozen=True)
class ProposalRequest:
    """A request to a proposer: propose what follows `token_ids`."""

    seq_id: int
    draw: Draw
    """How the target chooses the next token. Draft tokens that its matcher refuses are cut by the engine."""
    max_tokens: int
    """K: how many tokens to propose at most; may be 0."""
    branch: int = 0
    """The proposer's index among several for the same sequence: independent draws must differ."""
    independent: bool = False
    """Draw independently of the target's noise, and return the distributions: for the acceptance rule `rejection`."""

    @property
    def token_ids(self) -> Items[int]:
        """Prompt and output so far, at least one token. The caller's own list: read it before `propose` returns."""
        return self.draw.history


@dataclass(frozen=True)
class Proposal:
    """Draft tokens, in order."""

    token_ids: tuple[int, ...] = ()
    distributions: tuple[Distribution, ...] | None = None
    """Where the request is `independent` and the tokens were drawn: what each was drawn from. Else None."""
    cached: tuple[int, int] | None = None
    """Positions of the sequence in the proposer's own cache, before and after, if it has one."""
    proposer: str = ""
    """The proposer's name. The engine fills it in."""

    def __post_init__(self) -> None:
        if self.distributions is not None and len(self.distributions) != len(self.token_ids):
            raise ValueError(f"{len(self.distributions)} distributions for {len(self.token_ids)} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, num_tokens: int) -> "Proposal":
        """Return the first `num_tokens` tokens at most."""
        distributions = self.distributions and self.distributions[:num_tokens]
        return replace(self, token_ids=self.token_ids[:num_tokens], distributions=distributions)

    def cut(self, max_tokens: int, vocab_size: int) -> "Proposal":
        """Return the first `max_tokens` at most, ending before the first token outside the target's vocabulary."""
        ids = self.token_ids[:max_tokens]
        return self.first(next((i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size), len(ids)))


NO_PROPOSAL = Proposal()


class Proposer(ABC):
    """Proposes draft tokens for the sequences of one engine, which it knows by their ids."""

    name: str
    """The value of `--speculate`, or the draft model's name."""

    @abstractmethod
    def propose(self, requests: Items[ProposalRequest]) -> list[Proposal]:
        """Return one proposal per request, in order, each of at most its `max_tokens`.

        A proposal depends on its own request's tokens only, not on the other requests. Raises a `ForgeError` if it can
        propose nothing any more; the engine then goes on without this proposer.
        """

    def forget(self, seq_id: int) -> None:  # noqa: B027 (optional: not every proposer has state)
        """Drop the state of a sequence, if there is any."""


class ProposerFailure(NamedTuple):
    """A proposer that raised an error and is no longer used."""

    proposer: str
    message: str
    release_ms: float | None
    """Milliseconds from the revocation of its lease to the release of its model; None if that was not the error."""


@dataclass
class StepDrafts:
    """The draft tokens of one step."""

    proposals: dict[int, tuple[Proposal, ...]] = field(default_factory=dict)
    """By sequence id: its drafts, none of them empty."""
    ms: dict[str, float] = field(default_factory=dict)
    """Each proposer's time, by name."""
    failures: dict[int, ProposerFailure] = field(default_factory=dict)
    """By sequence id: why a proposer that was asked gave no draft tokens."""
    total_ms: float = 0.0


NO_DRAFTS = StepDrafts()


@dataclass(frozen=True)
class Verification:
    """The tokens that one cycle emits for a sequence, and why."""

    sampled: tuple[SampledToken, ...]
    """The accepted draft tokens, then one token of the target's own."""
    by_draft: tuple[tuple[TokenVerdict, ...], ...]
    """For each draft: a verdict per token, up to the first that was rejected."""
    winner: int
    """The draft whose rows hold the accepted tokens: its keys and values are kept."""

    @property
    def num_accepted(self) -> int:
        return len(self.sampled) - 1
