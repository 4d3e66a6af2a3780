"""Exercise 9: verification. Known cases, chi-squared of what is emitted against the target's own distribution, and the
engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from forge.engine.rng import Purpose, uniform
from forge.engine.sampling import Distribution, check_logits, distribution, log_sum_exp, penalized, sampled_token
from forge.engine.scheduler import Scheduler
from forge.exercises.exercise import Exercise, Rule, Trial
from forge.speculation import verification
from forge.trace.records import TokenVerdict

_TRIALS = 4000

RULES = {
    "greedy": Rule(
        "A draft token stands if and only if it is the target's likeliest token there.",
        "Which row decides about draft token i?",
    ),
    "own-token": Rule(
        "After the accepted tokens comes exactly one token of the target's own.",
        "What is emitted in place of the first rejected token, and what after the last accepted one?",
    ),
    "first-rejected": Rule(
        "After the first rejected draft token no other stands.", "Before which tokens were the later rows computed?"
    ),
    "accept": Rule(
        "A draft token stands with probability min(1, p / q).", "What if the draft proposes it as often as the target?"
    ),
    "residual": Rule(
        "In place of a rejected token one is drawn from the positive part of p - q, normalized.",
        "Which tokens does the draft propose too rarely, and by how much?",
    ),
    "normalized": Rule("The probabilities of the residual sum to 1.", "What is the sum of the positive part?"),
    "support": Rule(
        "The residual has only tokens with a positive probability, ids ascending.",
        "What about tokens that q has and p has not?",
    ),
    "nothing-left": Rule("Where nothing is left of p - q the residual is p.", "What is divided by the sum then?"),
    "distribution": Rule(
        "What is emitted has the target's distribution, whatever the draft proposes.",
        "Which token comes too often: one that the draft likes, or one that it does not?",
    ),
    "bonus": Rule("The bonus token is drawn from the last row of p.", "Which of the K + 1 rows follows draft token K?"),
    "kept": Rule(
        "The cache keeps the known tokens and the accepted draft tokens, and nothing of the target's own token.",
        "Which of the emitted tokens has a key and a value already?",
    ),
    "result": Rule("The functions return what their docstrings say.", "What is its type?"),
}


class VerificationTrial(Trial):
    """Compares the reader's verification with the target's own output and distribution."""

    def __init__(self, piece: ModuleType):
        super().__init__(piece, "import numpy as np; from forge.engine.sampling import Distribution as D")
        self.piece = piece
        self.setup = len(self.calls)

    def ask(self, line: str, function: Any, *arguments: Any) -> Any:
        del self.calls[self.setup :]
        return self.call(line, function, *arguments)

    def greedy(self, argmax: list[int], draft: list[int]) -> None:
        found = self.ask(f"piece.verify_greedy({argmax}, {draft})", self.piece.verify_greedy, argmax, draft)
        self.require(isinstance(found, list | tuple), "result", f"it returned {found!r}")
        agreed = next((i for i, token in enumerate(draft) if argmax[i] != token), len(draft))
        expected = [*draft[:agreed], argmax[agreed]]
        said = f"it emits {list(found)}, and the target alone would say {expected}"
        if list(found) == expected:
            return
        self.require(len(found) <= len(expected), "first-rejected", said)
        self.require(list(found) != expected[:-1], "own-token", said)
        self.require(len(found) != len(expected), "own-token", said)
        self.require(False, "greedy", said)

    def accept(self, p: float, q: float, draw: float) -> None:
        found = self.ask(f"piece.accept({p}, {q}, {draw})", self.piece.accept, p, q, draw)
        self.require(found in (True, False), "result", f"it returned {found!r}")
        said = f"p / q is {p / q:g}, the draw {draw}, and it returned {found}"
        self.require(bool(found) == (draw < p / q), "accept", said)

    def residual(self, p: Distribution, q: Distribution) -> None:
        found = self.ask(f"piece.residual({_shown(p)}, {_shown(q)})", self.piece.residual, p, q)
        self.require(isinstance(found, Distribution), "result", f"it returned {found!r}")
        expected = verification.residual(p, q)
        said = f"it is {_shown(found)}, and should be {_shown(expected)}"
        is_p = expected is p
        if not is_p:
            positive = (found.probabilities > 0).all() and (np.diff(found.token_ids) > 0).all()
            self.require(positive, "support", said)
            self.require(abs(found.probabilities.sum() - 1) < 1e-6, "normalized", said)
        same = found.token_ids.tolist() == expected.token_ids.tolist()
        same = same and np.allclose(found.probabilities, expected.probabilities)
        self.require(same, "nothing-left" if is_p else "residual", said)

    def sampled(self, p: list[Distribution], q: list[Distribution]) -> None:
        """Chi-squared of the first emitted token, and of the bonus token."""
        del self.calls[self.setup :]
        rng = np.random.default_rng(0)
        self.calls.append(f"p = [{', '.join(map(_shown, p))}]; q = [{', '.join(map(_shown, q))}]")
        self.calls.append("piece.verify_sampled(p, q, draft, draws, choose)  # 4,000 times, draft drawn from q")

        def choose(given: Distribution) -> int:
            return int(rng.choice(given.token_ids, p=given.probabilities))

        first, bonus = dict.fromkeys(p[0].token_ids.tolist(), 0), dict.fromkeys(p[-1].token_ids.tolist(), 0)
        for _ in range(_TRIALS):
            draft = [choose(one) for one in q]
            found = self.piece.verify_sampled(p, q, draft, rng.random(len(q)).tolist(), choose)
            self.require(isinstance(found, list | tuple) and found, "result", f"it returned {found!r}")
            said = f"draft {draft}, emitted {list(found)}"
            self.require(len(found) <= len(draft) + 1, "own-token", said)
            self.require(list(found[:-1]) == draft[: len(found) - 1], "first-rejected", said)
            self.require(found[0] in first, "distribution", f"{said}: p gives token {found[0]} no probability")
            first[found[0]] += 1
            if len(found) == len(draft) + 1:
                self.require(found[-1] in bonus, "bonus", f"{said}: the last row gives {found[-1]} no probability")
                bonus[found[-1]] += 1
        self._compare(first, p[0], "distribution")
        self.require(sum(bonus.values()) > 0, "own-token", "no bonus token was ever emitted")
        self._compare(bonus, p[-1], "bonus")

    def _compare(self, counts: dict[int, int], p: Distribution, rule: str) -> None:
        total = sum(counts.values())
        expected = total * p.probabilities
        statistic = float(((np.array([*counts.values()]) - expected) ** 2 / expected).sum())
        said = f"of {total} tokens {counts}; {dict(zip(counts, expected.round().tolist(), strict=True))} are expected"
        self.require(statistic < 25, rule, said)

    def kept(self, start: int, known: int, accepted: int) -> None:
        line = f"piece.kept_length({start}, {known}, {accepted})"
        found = self.ask(line, self.piece.kept_length, start, known, accepted)
        last = start + known + accepted
        self.require(found == last, "kept", f"it is {found!r}; positions 0 to {last - 1} hold what is right")


def _shown(given: Distribution) -> str:
    return f"D(np.array({given.token_ids.tolist()}), np.array({np.round(given.probabilities, 3).tolist()}))"


def _distribution(**probabilities: float) -> Distribution:
    """t3=0.5 is token 3 with probability 0.5."""
    ids = sorted((int(name[1:]), value) for name, value in probabilities.items())
    return Distribution(np.array([token for token, _ in ids]), np.array([value for _, value in ids]))


_P, _Q = _distribution(t1=0.5, t4=0.3, t7=0.2), _distribution(t1=0.2, t4=0.7, t9=0.1)
_LAST = _distribution(t2=0.9, t5=0.1)


def check(piece: ModuleType) -> None:
    trial = VerificationTrial(piece)
    for argmax, draft in (([5], []), ([5, 6], [5]), ([5, 6], [4]), ([5, 6, 7], [5, 9]), ([5, 6, 7], [9, 6])):
        trial.greedy(argmax, draft)
    rng = np.random.default_rng(1)
    for _ in range(50):
        trial.greedy(rng.integers(0, 2, 5).tolist(), rng.integers(0, 2, 4).tolist())
    for p, q, draw in ((0.5, 0.5, 0.99), (0.6, 0.3, 0.9), (0.2, 0.4, 0.45), (0.2, 0.4, 0.55), (0.0, 0.4, 0.001)):
        trial.accept(p, q, draw)
    trial.residual(_P, _Q)
    trial.residual(_distribution(t0=0.1, t3=0.9), _distribution(t0=0.6, t2=0.4))
    trial.residual(_P, _P)
    trial.sampled([_P, _LAST], [_Q])
    trial.sampled([_P, _P, _LAST], [_Q, _P])
    for start, known, accepted in ((10, 1, 3), (10, 1, 0), (0, 7, 2)):
        trial.kept(start, known, accepted)


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    commit = Scheduler._commit_draft_tokens

    def decide(logits: np.ndarray, drafts: Any, params: Any, history: Sequence[int], prompt: Any, name: Any) -> Any:
        seed, sample_index, position = name
        best, scores = check_logits(logits), penalized(logits, history, params, prompt)
        p, log_total = distribution(scores, params), log_sum_exp(logits, float(logits.max()))
        (draft,) = drafts
        draw = uniform(seed, sample_index, position, Purpose.ACCEPT, draft.run)
        odds = p.probability(draft.token_id), draft.q.probability(draft.token_id)
        stands = piece.accept(*odds, draw)
        emitted = draft.token_id if stands else piece.residual(p, draft.q).draw(*name, Purpose.RESAMPLE)
        verdict = TokenVerdict(draft.token_id, draft.token_id == emitted, best, odds[0], *odds, draw)
        return sampled_token(logits, log_total, emitted, params), [verdict]

    def roll_back(scheduler: Scheduler, item: Any, outcome: Any) -> Any:
        kept = piece.kept_length(item.start, item.num_tokens, outcome.num_accepted)
        return commit(scheduler, item, outcome._replace(num_accepted=kept - item.start - item.num_tokens))

    with (
        patch.object(verification, "_accept_or_resample", decide),
        patch.object(Scheduler, "_commit_draft_tokens", roll_back),
    ):
        yield _OPTIONS


_OPTIONS = {"kv": "paged", "speculate": "draft", "k": 4, "speculate_fixed": True, "acceptance": "rejection"}

EXERCISE = Exercise(
    names=("verify_greedy", "accept", "residual", "verify_sampled", "kept_length"),
    rules=RULES,
    hints=(
        "verify_greedy: walk along draft and argmax together. Each step emits the target's token; stop after the first "
        "that is not the draft's. After the last draft token one more row is left.",
        "accept in one line, without min: a draw between 0 and 1 is below p / q with probability min(1, p / q).",
        "residual: for each token of p, p - q (0 where q has none of it). Keep what is positive, divide by its sum.",
        "verify_sampled: the same walk. Accepted: go on. Rejected: draw from residual(p[i], q[i]) and stop.",
        "kept_length: the emitted token that is the target's own is computed in the next step, as any new token is.",
    ),
    solution=("forge.speculation.verification._verify", "forge.speculation.verification._accept_or_resample"),
    check=check,
    engine=engine,
    own=_OPTIONS,
    params={"max_tokens": 64, "ignore_eos": True, "temperature": 0.8, "seed": 3},
    view="speculation",
)
