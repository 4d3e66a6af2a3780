"""Parameters of which a few run in every run of the tests, and the rest where slow ones run."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

SLOW = pytest.mark.slow


def mostly_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All of the values; those that are not in `quick` are marked `slow`."""
    listed = list(values)
    assert quick and all(value in listed for value in quick), "a quick one is left"
    return [value if value in quick else pytest.param(*_parts(value), marks=SLOW) for value in listed]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def every(quick: int, slow: int = 1) -> pytest.MarkDecorator:
    """Parametrize `stride`: one in `quick` cases is tried, or one in `slow` where slow tests run."""
    return pytest.mark.parametrize("stride", [quick, pytest.param(slow, marks=SLOW)], ids=["some", "all"])
