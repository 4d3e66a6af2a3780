"""Exercise 1: from a row of logits to a token.

Read chapter 1 first (forge naive). The model gives a row of logits, one per token of the vocabulary. Greedy decoding
takes the greatest. Sampling filters, in this order: top-k, temperature, top-p, min-p; then it draws one of the tokens
that are left.

Fill in the three functions. Arrays may be given back as lists, and ids as NumPy's integers. An argument belongs to the
caller: change none. Then:

    forge build check 1      exact sets, and draws with given noise
    forge build run 1        a story, drawn by your code
"""

import numpy as np

from forge import SamplingParams


def greedy(logits: np.ndarray) -> int:
    """Return the id of the token with the greatest logit, of equals the lowest. logits: float32 `[vocab]`."""
    raise NotImplementedError("greedy")


def filtered(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that may be drawn: their ids, ascending, and their scores.

    A score is (logit - the greatest logit) / temperature, in float64. The filters, one after another, each on what the
    ones before have left:

    - `params.top_k`: the k tokens with the greatest logits, of equals those with the lower ids; 0 keeps all.
    - `params.temperature`, above 0: makes scores of logits. softmax(scores) are the probabilities.
    - `params.top_p`: the fewest tokens, the likeliest first and of equals the lower ids first, whose probabilities
      together are at least this; 1 keeps all. The probabilities of what top-k has left sum to 1.
    - `params.min_p`: tokens at least this times as likely as the likeliest; 0 keeps all.

    A row has 151,936 logits in Qwen3: the time may grow as that of a sort, and not with the square.
    """
    raise NotImplementedError("filtered")


def draw(token_ids: np.ndarray, scores: np.ndarray, uniform: np.ndarray) -> int:
    """Draw one of `token_ids` with probability softmax(scores), by Gumbel-max: the greatest of score - log(-log(u)).

    uniform: float64 `[n]`, a number between 0 and 1 for each token. Of equal sums the first wins.
    """
    raise NotImplementedError("draw")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
