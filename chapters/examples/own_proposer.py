"""A proposer of your own: it knows phrases that texts are full of."""

from collections.abc import Sequence

from forge import LLM, SamplingParams
from forge.engine.proposer import NO_PROPOSAL, Proposal, ProposalRequest, Proposer
from forge.testing import check_proposer


class PhraseProposer(Proposer):
    """Where a text ends with the beginning of a phrase, propose the rest of it. A wrong draft only costs time."""

    name = "phrases"

    def __init__(self, phrases: Sequence[Sequence[int]], least: int = 2):
        """phrases: token ids. least: how many tokens of one have to be there before the rest is proposed."""
        self.phrases, self.least = [list(phrase) for phrase in phrases], least

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        return [self._propose(list(request.token_ids), request.max_tokens) for request in requests]

    def _propose(self, text: list[int], k: int) -> Proposal:
        for phrase in self.phrases:
            for length in range(len(phrase) - 1, self.least - 1, -1):
                if text[-length:] == phrase[:length]:
                    return Proposal(tuple(phrase[length : length + k]))
        return NO_PROPOSAL


llm = LLM("tales", kv="paged")
prompt, params = "Once upon a time", SamplingParams(max_tokens=32)
(plain,) = llm.generate(prompt, params)
phrase = llm.tokenizer.encode(prompt + plain.outputs[0].text)  # what it says anyway: the best of all phrases
check_proposer(lambda: PhraseProposer([phrase]), texts=[phrase[:5]])
llm.speculate_with(PhraseProposer([phrase]))
(drafted,) = llm.generate(prompt, params)
assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
print(len(plain.metrics.forward_ms), "forwards without drafts,", len(drafted.metrics.forward_ms), "with")
