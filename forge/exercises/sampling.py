"""Exercise 1: greedy choice, the filters of sampling, one draw. Exact sets of tokens, and chi-squared on the draws."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from forge.engine import rng, sampling
from forge.engine.sampling_params import SamplingParams
from forge.exercises.exercise import Exercise, Rule, Trial

_DRAWS = 4000
_ROW = [2.0, -1.0, 2.0, 0.5, 1.0, -3.0, 1.5, 0.0]
_LOGS = [-0.6931472, -1.3862944, -2.0794415, -2.7725887, -2.7725887]
"""Of the probabilities 1/2, 1/4, 1/8, 1/16, 1/16."""

RULES = {
    "greedy": Rule("Greedy decoding takes the greatest logit, of equals the lowest id.", "Which index does it return?"),
    "all": Rule("Without a filter every token may be drawn.", "What do 0 and 1 mean for each filter?"),
    "top-k": Rule("top_k keeps exactly k tokens.", "How many tokens are as large as the k-th, and how many are kept?"),
    "ties": Rule("Of equal logits at the edge those with the lower ids are kept.", "In which order are equals sorted?"),
    "temperature": Rule(
        "A score is (logit - the greatest logit) / temperature.", "What does a small temperature do to differences?"
    ),
    "overflow": Rule(
        "However small the temperature, the greatest score is 0 and no score is NaN or infinite above.",
        "What comes first: the greatest logit taken away, or the division?",
    ),
    "top-p": Rule(
        "top_p keeps the fewest tokens whose probabilities reach the sum: the one that crosses it too.",
        "What is the sum before the token that crosses it, and what is it with that token?",
    ),
    "top-p-order": Rule(
        "top_p looks at the likeliest tokens first.", "In which order are probabilities added up: by id, or by size?"
    ),
    "top-p-temperature": Rule(
        "top_p adds up probabilities after temperature.", "Of which numbers is the softmax taken?"
    ),
    "top-p-after-top-k": Rule(
        "top_p adds up the probabilities of what top_k has left, which sum to 1.", "Over which tokens is the softmax?"
    ),
    "min-p": Rule(
        "min_p compares with the likeliest token, not with 1.",
        "How likely is the likeliest token, and what is min_p of it?",
    ),
    "ascending": Rule("The ids are ascending, and scores stand in the same order.", "Which order has the result?"),
    "result": Rule("filtered returns two arrays of one length: token ids and scores.", "What are their shapes?"),
    "unchanged": Rule("The row of logits belongs to the caller and is not changed.", "Which line writes into it?"),
    "drawn-from": Rule("A draw is one of the token ids.", "Is it an index, or the id at that index?"),
    "argmax": Rule("The greatest score plus noise wins.", "What is added to a score before the argmax?"),
    "distribution": Rule(
        "Over many draws each token comes with its probability.", "Which noise makes argmax a draw: -log(-log(u))?"
    ),
}

_CASES: tuple[tuple[str, list[float], dict[str, Any]], ...] = (
    ("all", _ROW, {"temperature": 1.0}),
    ("temperature", _ROW, {"temperature": 0.5}),
    ("temperature", _ROW, {"temperature": 3.0}),
    ("top-k", _ROW, {"temperature": 1.0, "top_k": 4}),
    ("ties", _ROW, {"temperature": 1.0, "top_k": 1}),
    ("ties", [1.0, 3.0, 2.0, 2.0, 2.0, 0.0], {"temperature": 1.0, "top_k": 3}),
    ("all", _ROW, {"temperature": 1.0, "top_k": 99}),
    ("top-p", _LOGS, {"temperature": 1.0, "top_p": 0.7}),
    ("top-p", _LOGS, {"temperature": 1.0, "top_p": 0.45}),
    ("top-p", _LOGS, {"temperature": 1.0, "top_p": 0.01}),
    ("top-p-order", _LOGS[::-1], {"temperature": 1.0, "top_p": 0.7}),
    ("top-p-temperature", _LOGS, {"temperature": 3.0, "top_p": 0.7}),
    ("top-p-after-top-k", _LOGS, {"temperature": 1.0, "top_k": 3, "top_p": 0.8}),
    ("min-p", _LOGS, {"temperature": 1.0, "min_p": 0.2}),
    ("min-p", _LOGS, {"temperature": 1.0, "min_p": 0.6}),
    ("overflow", [1000.0, 999.0, -1000.0], {"temperature": 1e-6}),
)
"""(the rule that a wrong answer breaks, a row, parameters)."""


class SamplingTrial(Trial):
    """Compares the reader's filters and draws with exact sets and counts."""

    def __init__(self, piece: ModuleType):
        super().__init__(piece, "import numpy as np; from forge import SamplingParams")
        self.piece = piece
        self.setup = len(self.calls)

    def greedy(self, row: list[float]) -> None:
        del self.calls[self.setup :]
        logits = np.array(row, np.float32)
        found = self.call(f"piece.greedy(np.array({row}, np.float32))", self.piece.greedy, logits)
        expected = int(logits.argmax())
        self.require(found == expected, "greedy", f"of {row} it takes token {found}, and not {expected}")

    def filtered(self, rule: str, row: list[float], options: dict[str, Any]) -> None:
        del self.calls[self.setup :]
        logits, params = np.array(row, np.float32), SamplingParams(**options)
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        shown = [round(value, 3) for value in row]
        line = f"piece.filtered(np.array({shown}, np.float32), SamplingParams({given}))"
        found = self.call(line, self.piece.filtered, logits.copy(), params)
        copied = logits.copy()
        self.call(line, self.piece.filtered, copied, params)
        self.calls.pop()
        self.require((copied == logits).all(), "unchanged", f"the row has become {copied.tolist()}")
        is_pair = isinstance(found, tuple) and len(found) == 2 and all(isinstance(one, np.ndarray) for one in found)
        self.require(is_pair and found[0].shape == found[1].shape and found[0].ndim == 1, "result", f"it is {found!r}")
        ids, scores = found[0].tolist(), found[1].astype(np.float64)
        wanted_ids, wanted = sampling.filtered(logits, params)
        expected = wanted_ids.tolist()
        self.require(sorted(ids) == expected, rule, f"with {given} it keeps tokens {ids}, and should keep {expected}")
        self.require(ids == expected, "ascending", f"the ids are {ids}")
        same = np.allclose(scores, wanted, rtol=1e-5, atol=1e-6)
        rule = "overflow" if rule == "overflow" else "temperature"
        self.require(same, rule, f"the scores are {np.round(scores, 3).tolist()}, not {np.round(wanted, 3).tolist()}")

    def drawn(self) -> None:
        del self.calls[self.setup :]
        ids, uniform = np.array([3, 8, 20]), np.array([0.5, 0.9, 0.1])
        for scores, expected in ((np.zeros(3), 8), (np.array([5.0, 0.0, 0.0]), 3), (np.array([0.0, 0.0, 9.0]), 20)):
            arrays = ", ".join(f"np.array({one.tolist()})" for one in (ids, scores, uniform))
            found = self.call(f"piece.draw({arrays})", self.piece.draw, ids, scores, uniform)
            self.require(found in ids.tolist(), "drawn-from", f"it is {found!r}, and the ids are {ids.tolist()}")
            self.require(found == expected, "argmax", f"it is {found}, and not {expected}")
            self.calls.pop()
        self._chi_squared(ids)

    def _chi_squared(self, ids: np.ndarray) -> None:
        probabilities = np.array([0.6, 0.3, 0.1])
        noise = np.random.default_rng(0).random((_DRAWS, 3))
        counts = dict.fromkeys(ids.tolist(), 0)
        line = "[piece.draw(ids, np.log([0.6, 0.3, 0.1]), u) for u in np.random.default_rng(0).random((4000, 3))]"
        self.calls.append(line)
        for uniform in noise:
            counts[int(self.piece.draw(ids, np.log(probabilities), uniform))] += 1
        found = np.array([*counts.values()])
        statistic = float((((found - _DRAWS * probabilities) ** 2) / (_DRAWS * probabilities)).sum())
        said = f"of {_DRAWS} draws {found.tolist()}; {(probabilities * _DRAWS).round().tolist()} are expected"
        self.require(statistic < 20, "distribution", said)  # two degrees of freedom: 1 in 20,000 by chance


def check(piece: ModuleType) -> None:
    trial = SamplingTrial(piece)
    for row in (_ROW, [-5.0, -2.0, -2.0], [1.0], [0.0, 7.0, 7.5, 7.5]):
        trial.greedy(row)
    for case in _CASES:
        trial.filtered(*case)
    generator = np.random.default_rng(0)
    for _ in range(60):
        row = (generator.standard_normal(12) * 3).round(2).tolist()
        options = {"temperature": 0.7, "top_k": int(generator.integers(0, 12)), "top_p": 0.9, "min_p": 0.05}
        trial.filtered("top-p-after-top-k", row, options)
    trial.drawn()


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    def drawn(token_ids: np.ndarray, scores: np.ndarray, *name: Any) -> int:
        uniform = (rng.token_words(token_ids, *name) + 0.5) * 2.0**-32
        return int(piece.draw(token_ids, scores, uniform))

    with patch.object(sampling, "filtered", piece.filtered), patch.object(sampling, "gumbel_argmax", drawn):
        yield _OPTIONS


_OPTIONS = {"kv": "paged"}

EXERCISE = Exercise(
    names=("greedy", "filtered", "draw"),
    rules=RULES,
    hints=(
        "Sort once: np.argsort(-logits, kind='stable') has the tokens from the greatest logit down, equals by id. Each "
        "filter keeps a beginning of that order.",
        "Take the greatest logit away before you divide by the temperature: exp of anything at most 0 is at most 1.",
        "top-p: with probabilities from the likeliest down, a token is kept if the sum of those *before* it is below "
        "top_p. So the one that crosses the sum is kept, and the first is kept always.",
        "min-p: the likeliest token has score 0, so a token's probability relative to it is exp(score).",
        "draw: argmax of scores - log(-log(u)) is an index. The answer is the id at that index.",
    ),
    solution=("forge.engine.sampling.filtered", "forge.engine.sampling._nucleus", "forge.engine.rng.gumbel_argmax"),
    check=check,
    engine=engine,
    own=_OPTIONS,
    params={"max_tokens": 96, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "seed": 7},
)
