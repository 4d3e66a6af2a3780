"""Exercise 9: verification. The check runs every draft over small vocabularies with every outcome of every decision,
and compares the emitted tokens and the last token's distribution exactly."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product, takewhile
from numbers import Integral
from operator import eq
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from forge.engine import sampling
from forge.engine.proposer import Proposal, Verification
from forge.engine.rng import DrawName, Purpose, gumbel_argmax, uniform
from forge.engine.sampling import Distribution, SampledToken, filtered
from forge.engine.sequence import Sequence as TokenSequence
from forge.exercises.exercise import Costs, Exercise, Part, Trial, are_ids, cache_of_kind, words_of
from forge.speculation import verification
from forge.speculation.speculator import Speculator
from forge.trace.records import TokenVerdict


class VerificationTrial(Trial):
    """Compares the reader's verification with the target's own output and distribution."""

    setup_lines = ("import numpy as np; from forge.engine.sampling import Distribution as D",)

    def greedy(self, argmax: Sequence[int], draft: Sequence[int]) -> None:
        agreed = next((i for i, token in enumerate(draft) if argmax[i] != token), len(draft))
        expected = [*draft[:agreed], argmax[agreed]]
        returned = self.call_anew(f"piece.verify_greedy({argmax}, {draft})", self.piece.verify_greedy, argmax, draft)
        emitted = self._tokens(returned)
        finding = f"it emits {emitted}, and the target alone would say {expected}"
        self.require(len(emitted) <= len(expected), "first-rejected", finding)
        is_last_wrong = emitted == expected[:-1] or len(emitted) == len(expected)
        self.require(emitted == expected, "own-token" if is_last_wrong else "greedy", finding)

    def _tokens(self, returned: Any) -> list[int]:
        self.require(are_ids(returned), "result", f"it returned {returned!r}")
        return [int(token) for token in returned]

    def accept(self, p: float, q: float, draw: float) -> None:
        accepted = self.call_anew(f"piece.accept({p}, {q}, {draw})", self.piece.accept, p, q, draw)
        self.require(accepted in (True, False), "result", f"it returned {accepted!r}")
        finding = f"p / q is {p / q:g}, the draw {draw}, and it returned {accepted}"
        self.require(bool(accepted) == (draw < p / q), "accept", finding)

    def residual(self, p: Distribution, q: Distribution) -> None:
        expected = verification.residual(p, q)
        is_p = expected is p
        returned = self.call_anew(f"piece.residual({_shown(p)}, {_shown(q)})", self.piece.residual, p, q)
        self.require(isinstance(returned, Distribution), "result", f"it returned {returned!r}")
        ids, probabilities = np.asarray(returned.token_ids), np.asarray(returned.probabilities, np.float64)
        is_sound = ids.shape == probabilities.shape and ids.ndim == 1 and ids.dtype.kind in "iu"
        self.require(is_sound, "result", f"it returned {returned!r}")
        finding = f"it is {_shown(returned)}, and should be {_shown(expected)}"
        if not is_p:
            self.require((probabilities > 0).all() and (np.diff(ids) > 0).all(), "support", finding)
            self.require(abs(probabilities.sum() - 1) < 1e-6, "normalized", finding)
        same = ids.tolist() == expected.token_ids.tolist()
        same = same and np.allclose(probabilities, expected.probabilities, atol=1e-9)
        self.require(same, "nothing-left" if is_p else "residual", finding)

    def sampled(self, p: list[Distribution], q: list[Distribution]) -> None:
        """Verify every draft that q can propose, with a draw on either side of p / q for each token: every possible
        outcome, compared exactly."""
        shown = f"p = [{', '.join(map(_shown, p))}]; q = [{', '.join(map(_shown, q))}]"
        for draft in product(*(proposed.token_ids.tolist() for proposed in q)):
            odds = [p[i].probability(token) / q[i].probability(token) for i, token in enumerate(draft)]
            for sides in product((False, True), repeat=len(draft)):
                draws = [_draw(ratio, stands) for ratio, stands in zip(odds, sides, strict=True)]
                if None not in draws:
                    self.restart()
                    self.calls.append(shown)
                    self._walk(p, q, list(draft), draws, sides)  # type: ignore[arg-type]

    def _walk(
        self,
        p: list[Distribution],
        q: list[Distribution],
        draft: list[int],
        draws: list[float],
        sides: Sequence[bool],
    ) -> None:
        accepted = next((i for i, stands in enumerate(sides) if not stands), len(draft))
        expected = verification.residual(p[accepted], q[accepted]) if accepted < len(draft) else p[-1]
        drawn: list[tuple[Distribution, int]] = []

        def choose(distribution: Distribution) -> int:
            drawn.append((distribution, -1 - len(drawn)))  # a token that nothing else can bring
            return drawn[-1][1]

        line = f"piece.verify_sampled(p, q, {draft}, {np.round(draws, 4).tolist()}, choose)"
        returned = self.call(line, self.piece.verify_sampled, p, q, draft, draws, choose)
        emitted = self._tokens(returned)
        finding = (
            f"of {draft} {accepted} stand; emitted is {emitted}, where negative numbers are tokens drawn by choose"
        )
        stood = sum(takewhile(bool, map(eq, emitted, draft)))
        self.require(stood == accepted, "accept" if len(draft) == 1 else "each-position", finding)
        self.require(len(emitted) <= accepted + 1, "first-rejected", finding)
        self.require(len(emitted) == accepted + 1, "own-token", finding)
        source = next((distribution for distribution, token in drawn if token == emitted[-1]), None)
        self.require(source is not None, "own-token", finding)
        rule = "bonus" if accepted == len(draft) else "distribution"
        finding = f"{finding}; it was drawn from {_shown(source)}, and should be from {_shown(expected)}"
        same = np.asarray(source.token_ids).tolist() == expected.token_ids.tolist()  # type: ignore[union-attr]
        same = same and np.allclose(source.probabilities, expected.probabilities)  # type: ignore[union-attr]
        self.require(same, rule, finding)

    def kept(self, start: int, known: int, accepted: int) -> None:
        line = f"piece.kept_length({start}, {known}, {accepted})"
        length = self.call_anew(line, self.piece.kept_length, start, known, accepted)
        last = start + known + accepted
        self.require(isinstance(length, Integral), "result", f"it returned {length!r}")
        self.require(length == last, "kept", f"it is {length!r}; positions 0 to {last - 1} hold what is right")


def _draw(ratio: float, stands: bool) -> float | None:
    """Return a draw that accepts, or rejects, at this ratio; None if no draw does."""
    if stands:
        return None if ratio == 0 else min(ratio, 1.0) * 0.75
    return None if ratio >= 1 else ratio + (1 - ratio) * 0.25


def _shown(distribution: Any) -> str:
    token_ids = np.asarray(distribution.token_ids).tolist()
    probabilities = np.round(distribution.probabilities, 3).tolist()
    return f"D(np.array({token_ids}), np.array({probabilities}))"


def _distribution(**probabilities: float) -> Distribution:
    """Build a distribution: t3=0.5 gives token 3 probability 0.5."""
    ids = sorted((int(name[1:]), value) for name, value in probabilities.items())
    return Distribution(np.array([token for token, _ in ids]), np.array([value for _, value in ids]))


def _examples() -> tuple[Distribution, Distribution, Distribution]:
    """Return a p, a q and a last p, new each time: a wrong solution may write into them."""
    q = _distribution(t1=0.2, t4=0.7, t9=0.1)
    return _distribution(t1=0.5, t4=0.3, t7=0.2), q, _distribution(t2=0.9, t5=0.1)


def _check_greedy(piece: ModuleType) -> None:
    trial = VerificationTrial(piece)
    for argmax, draft in (([5], []), ([5, 6], [5]), ([5, 6], [4]), ([5, 6, 7], [5, 9]), ([5, 6, 7], [9, 6])):
        trial.greedy(argmax, draft)
    for length in range(5):
        for tokens in product((0, 1), repeat=2 * length + 1):
            trial.greedy(list(tokens[length:]), list(tokens[:length]))


def _check_accept(piece: ModuleType) -> None:
    trial = VerificationTrial(piece)
    for p, q, draw in ((0.5, 0.5, 0.99), (0.6, 0.3, 0.9), (0.2, 0.4, 0.45), (0.2, 0.4, 0.55), (0.0, 0.4, 0.001)):
        trial.accept(p, q, draw)
    for p, q, draw in ((0.25, 0.5, 0.5), (0.0, 0.5, 0.0), (1.0, 1.0, 0.999), (1.0, 0.25, 0.0), (0.5, 1.0, 0.5)):
        trial.accept(p, q, draw)
    for p, q, draw in product((0.1, 0.3, 0.9), (0.1, 0.3, 0.9), (0.05, 0.2, 0.5, 0.7, 0.95)):
        trial.accept(p, q, draw)


def _check_residual(piece: ModuleType) -> None:
    trial = VerificationTrial(piece)
    p, q, _ = _examples()
    trial.residual(p, q)
    trial.residual(_distribution(t0=0.1, t3=0.9), _distribution(t0=0.6, t2=0.4))
    trial.residual(p, p)
    trial.residual(_distribution(t2=1.0), _distribution(t5=1.0))
    trial.residual(_distribution(t2=1.0), _distribution(t2=1.0))
    trial.residual(_distribution(t2=0.5, t9=0.5), _distribution(t0=1.0))
    rng = np.random.default_rng(1)
    for _ in range(40):
        p, q = (_random(rng) for _ in range(2))
        trial.residual(p, q)


def _random(rng: np.random.Generator, vocab: int = 6) -> Distribution:
    ids = np.flatnonzero(rng.random(vocab) < 0.6)
    ids = ids if len(ids) else np.array([2])
    weights = rng.random(len(ids)) + 0.05
    return Distribution(ids, weights / weights.sum())


def _check_sampled(piece: ModuleType) -> None:
    trial = VerificationTrial(piece)
    p, q, last = _examples()
    trial.sampled([p], [])
    trial.sampled([p, last], [q])
    trial.sampled([p, p, last], [q, p])
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 4):
        for _ in range(3):
            rows = [_random(rng, 3) for _ in range(length + 1)]
            trial.sampled(rows, [_random(rng, 3) for _ in range(length)])


def _check_kept(piece: ModuleType) -> None:
    trial = VerificationTrial(piece)
    for start, known, accepted in ((10, 1, 3), (10, 1, 0), (0, 7, 2), (3, 2, 4), (0, 1, 0), (100, 5, 9)):
        trial.kept(start, known, accepted)


@contextmanager
def engine(piece: ModuleType) -> Iterator[None]:
    with (
        patch.object(Speculator, "verify", _verify_with(piece)),
        cache_of_kind("", lambda cache, size: _roll_back_with(piece, cache)),
    ):
        yield


_verified: dict[int, tuple[int, int]] = {}
"""By sequence id: where its last verification began, and how many draft tokens were accepted."""


def _verify_with(piece: ModuleType) -> Callable[..., Verification]:
    """Return `Speculator.verify` with the reader's functions. The engine's own decides if there are several proposers,
    or if a token was not drawn from a distribution."""
    verify_forge = Speculator.verify

    def verify(self: Speculator, *arguments: Any) -> Verification:
        sequence, proposals, logits, (span, *_), wants_probabilities = arguments
        params, (proposal, *others) = sequence.params, proposals
        is_drawn = self.acceptance == "rejection" and proposal.distributions is not None
        if others or sequence.matcher is not None or not (params.plain_greedy or is_drawn):
            return verify_forge(self, *arguments)
        draft = list(proposal.token_ids)
        if params.plain_greedy:
            argmax = logits.argmax[span]
            returned = piece.verify_greedy(list(argmax), draft)
            decided: list[tuple[Any, ...]] = [(int(token_id),) for token_id in argmax]
        else:
            returned, decided = _sampled(piece, sequence, proposal, logits.rows[span])
        emitted = [int(token) for token in returned]
        num_accepted = len(emitted) - 1
        _verified[sequence.seq_id] = len(sequence.token_ids) - 1, num_accepted
        pairs = enumerate(zip(draft[: len(emitted)], decided, strict=False))
        verdicts = tuple(TokenVerdict(token, index < num_accepted, *numbers) for index, (token, numbers) in pairs)
        if params.plain_greedy and not wants_probabilities:
            tokens = [SampledToken(token, None, None) for token in emitted]
        else:
            tokens = [
                sampling.sampled_token(row, sampling.log_sum_exp(row, float(row.max())), token, params)
                for row, token in zip(logits.rows[span], emitted, strict=False)
            ]
        return Verification(tuple(tokens), (verdicts,), 0)

    return verify


def _sampled(
    piece: ModuleType, sequence: TokenSequence, proposal: Proposal, rows: np.ndarray
) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return what the reader's `verify_sampled` returns, drawn with the noise that the engine's own would use, and of
    each draft token the numbers that decide about it."""
    params, draft, history = sequence.params, list(proposal.token_ids), list(sequence.token_ids)
    nexts = [sequence.draw._replace(history=[*history, *draft[:index]]) for index in range(len(rows))]
    scores = [sampling.penalized(row, draw) for row, draw in zip(rows, nexts, strict=True)]
    p, q = [sampling.distribution(row, params) for row in scores], list(proposal.distributions or ())
    draws = [uniform(DrawName.of(draw, Purpose.ACCEPT)) for draw in nexts[:-1]]
    odds = [(p[i].probability(token), q[i].probability(token)) for i, token in enumerate(draft)]
    accepted = next((i for i, pair in enumerate(odds) if draws[i] * pair[1] >= pair[0]), len(draft))

    def choose(distribution: Distribution) -> int:
        if accepted == len(draft):
            return gumbel_argmax(*filtered(scores[-1], params), DrawName.of(nexts[-1]))
        return distribution.draw(DrawName.of(nexts[accepted], Purpose.RESAMPLE))

    best = [int(row.argmax()) for row in scores]
    decided = [(best[index], None, *pair, draws[index]) for index, pair in enumerate(odds)]
    return piece.verify_sampled(p, q, draft, draws, choose), decided


def _roll_back_with(piece: ModuleType, cache: Any) -> Any:
    """Return the cache, which now truncates to the reader's `kept_length` after rejected tokens."""
    truncate = cache.truncate

    def rolled_back(seq_id: int, length: int) -> None:
        verified = _verified.pop(seq_id, None)
        truncate(seq_id, length if verified is None else piece.kept_length(verified[0], 1, verified[1]))

    cache.truncate = rolled_back
    return cache


def _cost(piece: ModuleType | None, size: int) -> Callable[[], object]:
    rng = np.random.default_rng(0)
    return partial((piece or verification).residual, _random(rng, size), _random(rng, size))


EXERCISE = Exercise(
    **words_of("verification"),
    parts=(
        Part(("verify_greedy",), _check_greedy),
        Part(("accept",), _check_accept),
        Part(("residual",), _check_residual),
        Part(("accept", "residual", "verify_sampled"), _check_sampled),
        Part(("kept_length",), _check_kept),
    ),
    costs=Costs("residual over {:,} tokens", (16, 256, 4096), _cost),
    engine=engine,
    options={"kv": "paged", "speculate": "draft", "k": 4, "speculate_fixed": True, "acceptance": "rejection"},
    params=(
        {"max_tokens": 32, "ignore_eos": True, "temperature": 0.0},
        {"max_tokens": 64, "ignore_eos": True, "temperature": 0.8, "seed": 3},
    ),
    view="speculation",
)
