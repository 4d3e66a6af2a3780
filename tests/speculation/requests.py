"""Requests to propose, without an engine."""

from collections.abc import Sequence

from forge.engine.proposer import ProposalRequest, Verification
from forge.engine.sampling_params import SamplingParams
from forge.model.model import Draw

GREEDY = SamplingParams()


def request(
    token_ids: Sequence[int],
    k: int = 4,
    *,
    seq_id: int = 0,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    independent: bool = False,
) -> ProposalRequest:
    return ProposalRequest(seq_id, Draw(params, seed, 0, list(token_ids)), k, independent=independent)


def proposed(proposer, token_ids: Sequence[int], k: int = 4, **options) -> list[int]:
    (proposal,) = proposer.propose([request(token_ids, k, **options)])
    return list(proposal.token_ids)


def tokens_of(verification: Verification) -> tuple[int, ...]:
    """The tokens that a verification emits."""
    return tuple(token.token_id for token in verification.sampled)
