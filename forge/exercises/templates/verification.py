"""Exercise 9: verification of draft tokens.

Read chapter 7 first (forge speculation). A draft model has proposed K tokens; the target has computed a row after the
last known token and after each of them, K + 1 rows in one forward. Which of them stand?

Fill in the five functions. None changes its arguments. Then:

    forge build check 9      exactness, and the target's own distribution
    forge build run 9        the engine, with draft tokens that your code verifies
"""

from collections.abc import Callable, Sequence

from forge.engine.sampling import Distribution  # Distribution(token_ids, probabilities): two arrays


def verify_greedy(argmax: Sequence[int], draft: Sequence[int]) -> list[int]:
    """Return the tokens to emit: the draft tokens that the target would have said, then one token of the target's own.

    argmax: `[K + 1]`, the target's likeliest token in each row; row i decides about draft token i. draft: `[K]`.
    """
    raise NotImplementedError("verify_greedy")


def accept(p: float, q: float, draw: float) -> bool:
    """Return whether a draft token stands: with probability min(1, p / q), which is if the draw is below p / q.

    p, q: the token's probability of the target and of the draft, q above 0. draw: a number from 0 on and below 1.
    """
    raise NotImplementedError("accept")


def residual(p: Distribution, q: Distribution) -> Distribution:
    """Return the distribution from which a token in place of a rejected one is drawn: the positive part of p - q,
    normalized.

    A `Distribution` has `token_ids` (ascending) and their `probabilities`; `probability(token_id)` is 0 for a token
    that is not in it. Where rounding leaves nothing of the difference, return p.
    """
    raise NotImplementedError("residual")


def verify_sampled(
    p: Sequence[Distribution],
    q: Sequence[Distribution],
    draft: Sequence[int],
    draws: Sequence[float],
    choose: Callable[[Distribution], int],
) -> list[int]:
    """Return the tokens to emit: draft tokens for as long as they are accepted, then one token more.

    p: `[K + 1]`, the target's distributions; q, draft and draws: `[K]`, and K may be 0. choose: draws a token from a
    distribution; call it once. In place of the first rejected token one is drawn from the residual; after K accepted
    ones a bonus token from the last p.
    """
    raise NotImplementedError("verify_sampled")


def kept_length(start: int, num_known: int, num_accepted: int) -> int:
    """Return the cache's length after a cycle: how many positions hold keys and values that are right.

    The forward wrote `num_known` known tokens from position `start` on, and then K draft tokens, of which the first
    `num_accepted` stand. The target's own token was emitted and has not been computed yet.
    """
    raise NotImplementedError("kept_length")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
