from forge.engine.proposer import NO_PROPOSAL, Proposal, Proposer


class MyProposer(Proposer):
    name = "mine"
    min_ngram, max_ngram = 2, 4

    def propose(self, requests):
        return [self.proposal(request) for request in requests]

    def proposal(self, request):
        found = self.lookup(list(request.token_ids), request.max_tokens)
        return Proposal(found) if found else NO_PROPOSAL

    def lookup(self, token_ids, max_tokens):
        length = len(token_ids)
        for n in range(self.max_ngram, self.min_ngram - 1, -1):
            for begin in range(length - n - 1, -1, -1):
                if token_ids[begin : begin + n] == token_ids[length - n :]:
                    following = token_ids[begin + n : begin + n + max_tokens]
                    while following and len(following) < max_tokens:
                        following += following[: max_tokens - len(following)]
                    return tuple(following)
        return ()
