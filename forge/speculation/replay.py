"""A proposer that knows the answer: it replays texts that were recorded before.

What speculation could gain at best is what it gains with guesses that are always right and cost nothing. With an
agreement below 1 every so many guesses are wrong on purpose, and with 0 all of them: the worst that a proposer can do.
"""

from collections.abc import Sequence

from forge.engine.draws import Purpose, uniform
from forge.engine.proposer import NO_PROPOSAL, Proposal, ProposalRequest, Proposer


class ReplayProposer(Proposer):
    name = "replay"

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, agreement: float = 1.0):
        """texts: token ids, prompt and output, of every sequence that will be asked about. A token stands as recorded
        with probability `agreement`, which its position alone decides."""
        self._texts = [list(text) for text in texts]
        self.vocab_size, self.agreement = vocab_size, agreement

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: ProposalRequest) -> Proposal:
        start = len(request.token_ids)
        text = next((text for text in self._texts if text[:start] == list(request.token_ids)), None)
        if text is None:
            return NO_PROPOSAL
        following = text[start : start + request.max_tokens]
        return Proposal(tuple(self._said(token_id, start + index) for index, token_id in enumerate(following)))

    def _said(self, token_id: int, position: int) -> int:
        agrees = uniform(0, 0, position, Purpose.PROPOSE) < self.agreement
        return token_id if agrees else (token_id + 1) % self.vocab_size
