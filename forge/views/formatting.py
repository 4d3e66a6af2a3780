"""How numbers look, everywhere: one place so that two screens never disagree about a millisecond.

Milliseconds have one decimal, and below 1 two significant digits; counts have thousands separators, sizes are
in powers of 1000.
"""

from collections.abc import Callable, Mapping
from typing import Any

from forge.trace.explain import plural, two_digits

NOTHING = "–"
"""Stands where there is no figure: a run without a first token has no time to it."""


def ms(value: float | None) -> str:
    """Format milliseconds as `two_digits` does, without the unit."""
    return NOTHING if value is None else two_digits(value)


def count(value: int) -> str:
    return f"{value:,}"


def rate(value: float) -> str:
    """Format tokens per second: `1,540`, `24.6`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def size(num_bytes: int) -> str:
    """Format bytes: `0`, `812 B`, `34.8 kB`, `1.1 MB`."""
    if num_bytes == 0:
        return "0"
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:,.1f} TB"


def times(value: float) -> str:
    """Format a ratio: `3.8 x`."""
    return f"{value:,.1f} x"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def share(value: float) -> str:
    """Format a share that may be small: `6.2 %`."""
    return f"{value * 100:.1f} %"


def parameters(value: int) -> str:
    """Format a number of parameters: `7.1 M`, `596.0 M`, `1.7 B`."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f} {unit}"
    return str(value)


def ratio(value: float) -> str:
    """Format how many times as much, with the digits that such a figure has: `2.50`, `31.2`."""
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


FORMATS: Mapping[str, Callable[[Any], str]] = {
    function.__name__: function for function in (count, ms, parameters, percent, rate, ratio, share, size, times)
}


def formatted(value: Any, form: str = "", formats: Mapping[str, Callable[[Any], str]] = {}) -> str:
    """Format `value` as `form` says: `ms`, or another function of here or of `formats`; `plural token`; or a format of
    Python's, such as `.2f`. A unit may follow: `ms ms`. None is shown as nothing; of a value with a `text` (a figure
    with its spread) each number is shown so. Raises TypeError or ValueError for a form that the value cannot have."""
    name, _, unit = form.partition(" ")
    if value is None:
        return NOTHING
    if name == "plural":
        return plural(value, unit)
    show = formats.get(name) or FORMATS.get(name) or (lambda value: format(value, name))
    shown = value.text(show) if callable(getattr(value, "text", None)) else show(value)
    return f"{shown} {unit}" if unit else shown
