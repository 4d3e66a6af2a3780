"""Drafting without a model: the text that a grammar leaves no choice about.

After `{"he` a schema may leave only `ro": "`. That is text, and seldom one token: `ro` and `r` are both legal. So the
tokens in which the tokenizer would write it are proposed, and verified like any other draft's. A model that writes them
otherwise is not overruled, and the output stays what it would have been.
"""

from collections.abc import Sequence

from forge.engine.proposer import NO_PROPOSAL, Proposal, ProposalRequest, Proposer


class ForcedProposer(Proposer):
    """Proposes the text that a sequence's grammar forces, and nothing for other sequences."""

    name = "grammar"

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Propose the forced tokens, as many as are requested."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: ProposalRequest) -> Proposal:
        if request.matcher is None or not request.max_tokens:
            return NO_PROPOSAL
        forced = request.matcher.forced(request.token_ids[request.num_prompt_tokens :])
        return Proposal(forced[: request.max_tokens])
