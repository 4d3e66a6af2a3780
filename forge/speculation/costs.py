"""What a forward costs by its number of rows, and what a draft token costs: measured as the engine runs.

A decode step of the target takes about base + slope · rows milliseconds: it streams the weights once whatever the rows,
and multiplies for each of them. Both numbers are fitted to the lower quartile of recent steps. So a step during which
the machine was busy elsewhere, or the first of its kind, which touches new memory, does not count.

The times are given, no clock is read.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import fmean

from forge.speculation.controller import Costs

_RECENT = 15
"""Measurements of a kind that are kept."""
_ENOUGH = 3
"""Measurements of a kind before they are used."""
_PLAIN_FIRST = 8
"""Measurements of a plain step before draft tokens are compared with it: the first steps of a process are slow."""
_STALE = 64
"""Forwards after which a number of rows that no longer occurs is left out, unless it is the least of all."""
_REFRESH = 8
"""Forwards after which the costs are fitted anew: a fit takes longer than a draft token."""


class CostMeter:
    """Measures the costs of one draft beside one target."""

    def __init__(self, assumed: Costs):
        """assumed: the costs until there are measurements, for instance from the sizes of the models."""
        self.assumed = assumed
        self._forward_ms: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._token_ms: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._seen: dict[int, int] = {}
        """The number of the last forward with so many rows."""
        self._num_forwards = 0
        self._costs: dict[int, Costs] = {}

    @property
    def plain_forwards_left(self) -> int:
        """The number of plain forwards until draft tokens can be compared with them: enough of some number of rows."""
        return max(0, _PLAIN_FIRST - max(map(len, self._forward_ms.values()), default=0))

    def add_forward(self, num_rows: int, ms: float) -> None:
        """Add a step in which every sequence decoded or verified: the target's forward, and the work around it."""
        self._forward_ms[num_rows].append(ms)
        self._seen[num_rows] = self._num_forwards = self._num_forwards + 1
        if self._num_forwards % _REFRESH == 0:
            self._costs = {}

    def add_proposal(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        """Add the time of a proposal for several sequences, `num_tokens` each."""
        self._token_ms[num_sequences].append(ms / num_tokens)

    def add_bound(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        """Add a proposal in which the proposer also read a text: an upper bound. If even that is below the measured
        times, those are out of date."""
        times = self._token_ms.get(num_sequences)
        if times and ms / num_tokens < _lower_quartile(times):
            times.clear()
            self._costs = {}

    def costs(self, num_sequences: int) -> Costs:
        """Return the costs in units of a plain decode step of `num_sequences` sequences, each of which has draft
        tokens."""
        if num_sequences not in self._costs:
            self._costs[num_sequences] = self._fitted(num_sequences)
        return self._costs[num_sequences]

    def _fitted(self, num_sequences: int) -> Costs:
        line = self._line()
        if line is None:
            return self.assumed
        base, slope = line
        plain_ms = base + slope * num_sequences
        known = [measured for measured, times in self._token_ms.items() if len(times) >= _ENOUGH]
        nearest = min(known, key=lambda measured: abs(measured - num_sequences), default=None)
        token = self.assumed.token if nearest is None else _lower_quartile(self._token_ms[nearest]) / plain_ms
        return Costs(token, slope * num_sequences / plain_ms)

    def _line(self) -> tuple[float, float] | None:
        """Return (base, slope) in milliseconds by least squares; None before the first forward. As long as only one
        number of rows has been seen often enough, the price of a row is the assumed one."""
        known = [rows for rows, times in self._forward_ms.items() if len(times) >= _ENOUGH]
        if not known:
            return None
        least, oldest = min(known), self._num_forwards - _STALE
        points = [
            (rows, _lower_quartile(self._forward_ms[rows]))
            for rows in known
            if self._seen[rows] >= oldest or rows == least
        ]
        middle_rows, middle_ms = (fmean(values) for values in zip(*points, strict=True))
        spread = sum((rows - middle_rows) ** 2 for rows, _ in points)
        if spread:
            slope = sum((rows - middle_rows) * (ms - middle_ms) for rows, ms in points) / spread
        else:
            slope = self.assumed.row * middle_ms / (1 + self.assumed.row * (middle_rows - 1))
        slope = min(max(slope, 0.0), middle_ms / middle_rows)  # neither part of a forward takes less than no time
        return middle_ms - slope * middle_rows, slope


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]
