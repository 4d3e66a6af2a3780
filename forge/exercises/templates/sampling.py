"""Exercise 1: from a row of logits to a token.

Read chapter 1 first (forge naive). The model gives a row of logits, one per token of the vocabulary. Greedy decoding
takes the greatest. Sampling filters, in this order: top-k, temperature, top-p, min-p; then it draws one of the tokens
that are left.

Fill in the three functions. Then:

    forge build check 1      exact sets, and the distribution of the draws
    forge build run 1        a story, drawn by your code
"""

import numpy as np

from forge import SamplingParams


def greedy(logits: np.ndarray) -> int:
    """The id of the token with the greatest logit, of equals the lowest. logits: float32 `[vocab]`."""
    raise NotImplementedError("greedy")


def filtered(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn: their ids, ascending, and their scores.

    A score is (logit - the greatest logit) / temperature, in float64. The filters, one after another, each on what the
    ones before have left:

    - `params.top_k`: the k tokens with the greatest logits, of equals those with the lower ids; 0 keeps all.
    - `params.temperature`, above 0: makes scores of logits. softmax(scores) are the probabilities.
    - `params.top_p`: the fewest tokens, the likeliest first, whose probabilities reach this sum; 1 keeps all.
    - `params.min_p`: tokens at least this times as likely as the likeliest; 0 keeps all.
    """
    raise NotImplementedError("filtered")


def draw(token_ids: np.ndarray, scores: np.ndarray, uniform: np.ndarray) -> int:
    """One of `token_ids` with probability softmax(scores), by Gumbel-max: the greatest of score - log(-log(u)).

    uniform: float64 `[n]`, a number between 0 and 1 for each token. Of equal sums the first wins.
    """
    raise NotImplementedError("draw")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
