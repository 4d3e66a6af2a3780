"""Exercise 1: greedy choice, the filters of sampling, one draw. The check compares exact sets of tokens, and draws with
given noise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from forge.engine import rng, sampler, sampling
from forge.engine.sampling_params import SamplingParams
from forge.exercises.exercise import Costs, Exercise, Part, Trial, are_ids, words_of

_ROW = [2.0, -1.0, 2.0, 0.5, 1.0, -3.0, 1.5, 0.0]
_LOGS = [-0.6931472, -1.3862944, -2.0794415, -2.7725887, -2.7725887]
"""Logarithms of the probabilities 1/2, 1/4, 1/8, 1/16, 1/16."""


_CASES: tuple[tuple[str, list[float], dict[str, Any]], ...] = (
    ("all", _ROW, {"temperature": 1.0}),
    ("temperature", _ROW, {"temperature": 0.5}),
    ("temperature", _ROW, {"temperature": 3.0}),
    ("top-k", _ROW, {"temperature": 1.0, "top_k": 4}),
    ("ties", _ROW, {"temperature": 1.0, "top_k": 1}),
    ("ties", [1.0, 3.0, 2.0, 2.0, 2.0, 0.0], {"temperature": 1.0, "top_k": 3}),
    ("top-p", [1.0, 1.0, 1.0, 1.0], {"temperature": 1.0, "top_p": 0.5}),
    ("min-p", [2.0, 0.0, 2.0], {"temperature": 1.0, "min_p": 1.0}),
    ("min-p", [0.5], {"temperature": 0.7, "top_k": 1, "top_p": 0.01, "min_p": 1.0}),
    ("min-p", _LOGS, {"temperature": 3.0, "min_p": 0.6}),
    ("all", _ROW, {"temperature": 1.0, "top_k": 99}),
    ("top-p", _LOGS, {"temperature": 1.0, "top_p": 0.7}),
    ("top-p", _LOGS, {"temperature": 1.0, "top_p": 0.45}),
    ("top-p", _LOGS, {"temperature": 1.0, "top_p": 0.01}),
    ("top-p-order", _LOGS[::-1], {"temperature": 1.0, "top_p": 0.7}),
    ("ties", [0.0, 2.0, 2.0, 2.0, 2.0], {"temperature": 0.25, "top_p": 0.3}),
    ("top-p-temperature", _LOGS, {"temperature": 3.0, "top_p": 0.7}),
    ("top-p-after-top-k", _LOGS, {"temperature": 1.0, "top_k": 3, "top_p": 0.8}),
    ("min-p", _LOGS, {"temperature": 1.0, "min_p": 0.2}),
    ("min-p", _LOGS, {"temperature": 1.0, "min_p": 0.6}),
    ("overflow", [1000.0, 999.0, -1000.0], {"temperature": 1e-6}),
)
"""(the rule that a wrong answer breaks, a row, parameters)."""


class SamplingTrial(Trial):
    """Compares the reader's filters and draws with exact sets and counts."""

    setup_lines = ("import numpy as np; from forge import SamplingParams",)

    def greedy(self, row: list[float]) -> None:
        logits = np.array(row, np.float32)
        expected = int(logits.argmax())
        line = f"piece.greedy(np.array({row}, np.float32))"
        token_id = self.call_anew(line, self.piece.greedy, logits)
        self.require(isinstance(token_id, Integral), "id", f"it returned {token_id!r}")
        self.require(token_id == expected, "greedy", f"of {row} it takes token {token_id}, and not {expected}")

    def filtered(self, rule: str, row: list[float], options: dict[str, Any]) -> None:
        logits, params = np.array(row, np.float32), SamplingParams(**options)
        expected_ids, expected = sampling.filtered(logits.copy(), params)
        settings = ", ".join(f"{name}={value}" for name, value in options.items())
        line = f"piece.filtered(np.array({[round(value, 3) for value in row]}, np.float32), SamplingParams({settings}))"
        pair = self.call_anew(line, self.piece.filtered, logits, params)
        self.require(isinstance(pair, tuple | list) and len(pair) == 2, "result", f"it returned {pair!r}")
        ids, scores = self._listed(pair[0]), self._listed(pair[1])
        self.require(len(ids) == len(scores) and are_ids(ids), "result", f"it returned {pair!r}")
        kept = expected_ids.tolist()
        self.require(sorted(ids) == kept, rule, f"with {settings} it keeps tokens {ids}, and should keep {kept}")
        self.require(ids == kept, "ascending", f"the ids are {ids}")
        same = np.allclose(scores, expected, rtol=1e-5, atol=1e-6)
        rule = "overflow" if rule == "overflow" else "temperature"
        self.require(same, rule, f"the scores are {np.round(scores, 3).tolist()}, not {np.round(expected, 3).tolist()}")
        again = self.call(line, self.piece.filtered, logits, params)
        self.require(self._listed(again[0]) == ids and self._listed(again[1]) == scores, "again", f"then {again!r}")

    def _listed(self, values: Any) -> list[Any]:
        """Convert a list or a one-dimensional array to plain Python numbers."""
        listed = values.tolist() if isinstance(values, np.ndarray) else values
        is_flat = isinstance(listed, list | tuple) and not any(isinstance(value, list | tuple) for value in listed)
        self.require(is_flat, "result", f"{values!r} has not one dimension")
        return [value.item() if isinstance(value, np.generic) else value for value in listed]

    def drawn(self, rule: str, ids: np.ndarray, scores: np.ndarray, uniform: np.ndarray) -> None:
        expected = int(ids[np.argmax(scores - np.log(-np.log(uniform)))])
        arrays = ", ".join(f"np.array({array.round(6).tolist()})" for array in (ids, scores, uniform))
        token_id = self.call_anew(f"piece.draw({arrays})", self.piece.draw, ids, scores, uniform)
        self.require(isinstance(token_id, Integral), "id", f"it returned {token_id!r}")
        self.require(token_id in ids.tolist(), "drawn-from", f"it is {token_id!r}, and the ids are {ids.tolist()}")
        self.require(token_id == expected, rule, f"it is {token_id}, and not {expected}")


def _check_greedy(piece: ModuleType) -> None:
    trial = SamplingTrial(piece)
    for row in (_ROW, [-5.0, -2.0, -2.0], [1.0], [0.0, 7.0, 7.5, 7.5], [3.0, 1.0, 3.0], [-1.0, -2.0]):
        trial.greedy(row)


def _check_filtered(piece: ModuleType) -> None:
    trial = SamplingTrial(piece)
    for case in _CASES:
        trial.filtered(*case)
    generator = np.random.default_rng(0)
    for number in range(60):
        row = (generator.standard_normal(1 + number % 12) * 3).round(2).tolist()
        options = {"temperature": 0.7, "top_k": int(generator.integers(0, 12)), "top_p": 0.9, "min_p": 0.05}
        trial.filtered("top-p-after-top-k", row, options)
    line = "piece.filtered(np.random.default_rng(0).standard_normal(16_000), SamplingParams(top_k=40, top_p=0.95))"
    trial.require_growth(line, partial(_cost, piece), 500, 16_000, 200)


def _check_draw(piece: ModuleType) -> None:
    trial = SamplingTrial(piece)
    ids, uniform = np.array([3, 8, 20]), np.array([0.5, 0.9, 0.1])
    trial.drawn("argmax", ids, np.array([5.0, 0.0, 0.0]), uniform)
    trial.drawn("argmax", ids, np.zeros(3), uniform)
    trial.drawn("argmax", ids, np.array([0.0, 0.0, 9.0]), uniform)
    trial.drawn("argmax", ids, np.zeros(3), np.array([0.2, 0.7, 0.7]))
    trial.drawn("argmax", np.array([6]), np.zeros(1), np.array([0.3]))
    trial.drawn("argmax", np.array([0, 7]), np.array([0.0, -1.0]), np.array([0.5, 0.5]))
    generator = np.random.default_rng(0)
    for number in range(200):
        size = 2 + number % 7
        scores = generator.standard_normal(size) - 2
        trial.drawn("distribution", np.arange(size) * 3 + number, scores, generator.random(size))


@contextmanager
def engine(piece: ModuleType) -> Iterator[None]:
    def filtered(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        ids, scores = piece.filtered(logits, params)
        return np.asarray(ids, np.int64), np.asarray(scores, np.float64)

    def drawn(token_ids: np.ndarray, scores: np.ndarray, name: rng.DrawName) -> int:
        uniform = (rng.token_words(token_ids, name) + 0.5) * 2.0**-32
        return int(piece.draw(token_ids, scores, uniform))

    def argmax_rows(rows: Any) -> tuple[list[int], list[float]]:
        ids = [int(piece.greedy(np.asarray(row))) for row in rows]
        return ids, [float(row[token_id]) for row, token_id in zip(rows, ids, strict=True)]

    with (
        patch.object(sampling, "filtered", filtered),
        patch.object(sampling, "gumbel_argmax", drawn),
        patch.object(sampler, "argmax_rows", argmax_rows),
    ):
        yield


def _cost(piece: ModuleType | None, size: int) -> Callable[[], object]:
    row = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02)
    return partial((piece or sampling).filtered, row, params)


EXERCISE = Exercise(
    **words_of("sampling"),
    parts=(
        Part(("greedy",), _check_greedy),
        Part(("filtered",), _check_filtered),
        Part(("draw",), _check_draw),
    ),
    costs=Costs("filtered, {:,} logits", (4_000, 32_000, 151_936), _cost),
    engine=engine,
    options={"kv": "paged"},
    params=(
        {"max_tokens": 32, "temperature": 0.0},
        {"max_tokens": 96, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "seed": 7},
    ),
)
