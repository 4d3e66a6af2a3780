"""Requests to propose, without an engine."""

from collections.abc import Sequence

from forge.engine.proposer import ProposalRequest
from forge.engine.sampling_params import SamplingParams

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
    return ProposalRequest(seq_id, list(token_ids), k, params, seed, 0, independent=independent)


def proposed(proposer, token_ids: Sequence[int], k: int = 4, **options) -> list[int]:
    (proposal,) = proposer.propose([request(token_ids, k, **options)])
    return list(proposal.token_ids)
