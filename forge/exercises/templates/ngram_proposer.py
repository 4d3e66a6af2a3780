"""Exercise 10: a proposer that looks n-grams up.

Read chapter 7 first (forge speculation). A text often repeats itself: find the last few tokens earlier in the text, and
propose what came after them. No model is needed.

    text       1 2 3 9 1 2
                   ^^^ the last two tokens are here too, so propose what follows:  3 9 1 2 …

Fill in the two functions. Then:

    forge build check 10      does it keep its promises, and is it accepted often enough?
    forge build run 10        the engine, with your draft tokens
"""

from collections.abc import Sequence

from forge.engine.proposer import NO_PROPOSAL, Proposal, ProposalRequest, Proposer  # Proposal((3, 9)), NO_PROPOSAL


class MyProposer(Proposer):
    """Proposes what followed the last n tokens the last time. A wrong proposal costs time and changes no text."""

    name = "mine"
    min_ngram, max_ngram = 2, 4

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Return one proposal per request, in order: `Proposal(token_ids)`, or `NO_PROPOSAL` where nothing is found.

        Of a request you need `token_ids` (the sequence's tokens so far: read them, and never change them) and
        `max_tokens` (propose that many at most; may be 0). You may remember a text under its `seq_id`: under one id it
        only grows, until `forget(seq_id)`. A proposal follows from its own text alone.
        """
        raise NotImplementedError("propose")

    def lookup(self, token_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return the tokens that followed an earlier occurrence of the text's last n tokens.

        The longest n from `self.max_ngram` down to `self.min_ngram` that has an earlier occurrence; of several
        occurrences the latest one, which may overlap the end of the text but not be it. token_ids: a list. Where the
        text ends before `max_tokens` are found, propose fewer, or read on from your own proposal. () if there is no
        earlier occurrence. The time may grow with the length of the text, not with its square.
        """
        raise NotImplementedError("lookup")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
