"""A proposer that knows the answer: it replays texts that were recorded before.

Its draft tokens are always right and cost nothing, which bounds what speculation can gain. With an agreement below 1
some are wrong on purpose, and with 0 all of them: the worst that a proposer can do.
"""

from collections.abc import Sequence

from forge.engine.proposer import NO_PROPOSAL, Proposal, ProposalRequest, Proposer
from forge.engine.rng import Purpose, uniform


class ReplayProposer(Proposer):
    """Proposes the recorded continuation of a text."""

    name = "replay"

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, agreement: float = 1.0):
        """texts: token ids, prompt and output, of every sequence that will be requested. A token is proposed as
        recorded with probability `agreement`; its position alone decides."""
        self._texts = [list(text) for text in texts]
        self.vocab_size, self.agreement = vocab_size, agreement

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Propose the recorded tokens after each request's text, nothing for a text that was not recorded."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: ProposalRequest) -> Proposal:
        start = len(request.token_ids)
        text = next((text for text in self._texts if text[:start] == list(request.token_ids)), None)
        if text is None:
            return NO_PROPOSAL
        following = text[start : start + request.max_tokens]
        return Proposal(tuple(self._token(token_id, start + index) for index, token_id in enumerate(following)))

    def _token(self, token_id: int, position: int) -> int:
        agrees = uniform(0, 0, position, Purpose.PROPOSE) < self.agreement
        return token_id if agrees else (token_id + 1) % self.vocab_size
