"""Adaptive draft length: how many draft tokens to verify, sequence by sequence, and none where they do not pay.

A cycle of K draft tokens emits αK + 1 tokens, α being the share that is accepted, and costs one forward of the target
and K of the draft. So against plain decoding it gains the factor

    (αK + 1) / (1 + K · t_draft / t_target)

(Leviathan et al. 2023), where the target's forward over K + 1 rows is taken to cost what one over a single row does.
Here each further row has its price too. α depends on K, because draft tokens behind a rejected one are wasted: if each
is accepted with probability a after its predecessors were, αK = a + a² + … + a^K. What is estimated is a: accepted
draft tokens over those that the target decided about, recent cycles weighing more.

Hardly above 1 for every K, speculation goes off; after a pause, counted in output tokens, a single draft token is
tried. If that is rejected the pause grows, up to a limit. So a useless draft costs little at first and ever less later.

`SpeculationControl` is a value: what happened goes in, the next value comes out.

What a draft token costs is measured as the engine runs (`CostMeter`). A decode step of the target takes about base +
slope · rows milliseconds: it streams the weights once whatever the rows, and multiplies for each of them. Both numbers
are fitted to the lower quartile of recent steps. So a step during which the machine was busy elsewhere, or the first of
its kind, which touches new memory, does not count. The times are given: no clock is read here.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, linear_regression
from typing import NamedTuple

from forge.reasons import SpecReason
from forge.trace.records import SpecDecision

WINDOW = 50
"""Cycles that the acceptance rate is taken over."""
_DECAY = 0.9
"""Weight of a cycle in the estimate of a, relative to the one after it."""
_PRIOR_ACCEPTANCE = 0.7
"""Prior of a, before the first cycle."""
_PRIOR_WEIGHT = 2.0
"""Draft tokens that the prior counts for. Decays like a cycle."""
_MIN_GAIN = 1.05
"""A smaller predicted speed-up counts as none: the costs leave out more than that."""
_FIRST_PAUSE = 64
"""Output tokens of the first pause. A probe is expensive: the draft has to read what it missed."""
_LONGEST_PAUSE = 256
_PROVEN = 16
"""Cycles in a row after which the next pause is short again."""


@dataclass(frozen=True)
class Costs:
    """The costs of speculation, in plain decode steps of the target."""

    token: float
    """One draft token: t_draft / t_target."""
    row: float = 0.0
    """What each further row adds to the target's forward."""


def speed_up(accept_rate: float, k: int, costs: Costs) -> float:
    """Predict how many times faster cycles of `k` draft tokens are than plain decoding."""
    return (accept_rate * k + 1) / (1 + k * (costs.token + costs.row))


class AcceptanceEstimate(NamedTuple):
    """The estimated acceptance a: accepted draft tokens over decided ones, each cycle weighing less than the one after
    it."""

    accepted: float = _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT
    decided: float = _PRIOR_WEIGHT

    def after(self, proposed: int, accepted: int) -> "AcceptanceEstimate":
        """Return the estimate with one more cycle. The target decided up to the first token that it rejected."""
        decided = min(accepted + 1, proposed)
        return AcceptanceEstimate(_DECAY * self.accepted + accepted, _DECAY * self.decided + decided)


_PRIOR = AcceptanceEstimate()


@dataclass(frozen=True)
class SpeculationControl:
    """The adaptive draft length of one sequence: `decision` is the next cycle's. Made by `begin`."""

    max_k: int
    fixed: bool
    decision: SpecDecision
    recent: tuple[tuple[int, int], ...] = ()
    """(proposed, accepted) of each of the last 50 cycles."""
    estimate: AcceptanceEstimate = _PRIOR
    """From the cycles since it was last switched on."""
    num_cycles: int = 0
    """How many those are."""
    pause: int = _FIRST_PAUSE
    """Output tokens that the next pause will last."""

    @classmethod
    def begin(cls, max_k: int, costs: Costs, *, fixed: bool = False) -> "SpeculationControl":
        """Start the control of a sequence. max_k: draft tokens per cycle at most. fixed: always that many, however few
        are accepted."""
        initial = SpecDecision(max_k, "fixed" if fixed else "wins", speed_up=1.0, accept_rate=None)
        return cls(max_k, fixed, initial)._decided(costs)

    @property
    def k(self) -> int:
        """The number of draft tokens of the next cycle; 0 while it is off."""
        return self.decision.k

    def after_cycle(self, proposed: int, accepted: int, costs: Costs) -> "SpeculationControl":
        """Return the control after a cycle with draft tokens."""
        recent, estimate = (*self.recent, (proposed, accepted)), self.estimate.after(proposed, accepted)
        known = replace(self, recent=recent[-WINDOW:], estimate=estimate, num_cycles=self.num_cycles + 1)
        if self.decision.reason == "probes" and accepted == 0:
            return known._off(costs)
        if known.num_cycles == _PROVEN:
            known = replace(known, pause=_FIRST_PAUSE)
        return known._decided(costs)

    def probing(self, costs: Costs) -> "SpeculationControl":
        """Return the control after the pause, in which it was off: one draft token is tried."""
        return replace(self, decision=self._decision(1, "probes", self._predicted(costs)[0]))

    def _decided(self, costs: Costs) -> "SpeculationControl":
        """Return the control with the draft length of the greatest predicted speed-up, or off."""
        predicted = self._predicted(costs)
        if self.fixed:
            return replace(self, decision=self._decision(self.max_k, "fixed", predicted[-1]))
        best = max(predicted)
        if best < _MIN_GAIN:
            return self._off(costs)
        k = 1 + predicted.index(best)
        reason: SpecReason = "wins" if k == self.max_k else "turned_down"
        if self.decision.reason == "probes":
            reason = "on_again"
        return replace(self, decision=self._decision(k, reason, best))

    def _off(self, costs: Costs) -> "SpeculationControl":
        reason: SpecReason = "loses" if speed_up(1, self.max_k, costs) > 1 else "cannot_win"
        decision = self._decision(0, reason, max(self._predicted(costs)), self.pause)
        longer = min(3 * self.pause, _LONGEST_PAUSE)
        return replace(self, decision=decision, estimate=_PRIOR, num_cycles=0, pause=longer)

    def _predicted(self, costs: Costs) -> list[float]:
        """Return the predicted speed-up of 1, 2, … `max_k` draft tokens."""
        a = self.estimate.accepted / self.estimate.decided
        accepted = accumulate(a**k for k in range(1, self.max_k + 1))
        return [speed_up(expected / k, k, costs) for k, expected in enumerate(accepted, start=1)]

    def _decision(self, k: int, reason: SpecReason, predicted: float, retry_in: int | None = None) -> SpecDecision:
        proposed, accepted = map(sum, zip(*self.recent, strict=True)) if self.recent else (0, 0)
        return SpecDecision(k, reason, predicted, accepted / proposed if proposed else None, retry_in)


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
        times = self._token_ms[num_sequences]
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
        token_ms = _typical(self._token_ms)
        nearest = min(token_ms, key=lambda measured: abs(measured - num_sequences), default=None)
        token = self.assumed.token if nearest is None else token_ms[nearest] / plain_ms
        return Costs(token, slope * num_sequences / plain_ms)

    def _line(self) -> tuple[float, float] | None:
        """Return (base, slope) in milliseconds by least squares; None before the first forward. As long as only one
        number of rows has been seen often enough, the price of a row is the assumed one."""
        forward_ms = _typical(self._forward_ms)
        if not forward_ms:
            return None
        least, oldest = min(forward_ms), self._num_forwards - _STALE
        known = {rows: ms for rows, ms in forward_ms.items() if self._seen[rows] >= oldest or rows == least}
        middle_rows, middle_ms = fmean(known), fmean(known.values())
        if len(known) > 1:
            slope = linear_regression(list(known), list(known.values())).slope
        else:
            slope = self.assumed.row * middle_ms / (1 + self.assumed.row * (middle_rows - 1))
        slope = min(max(slope, 0.0), middle_ms / middle_rows)  # neither part of a forward takes less than no time
        return middle_ms - slope * middle_rows, slope


def _typical(times_of: dict[int, deque[float]]) -> dict[int, float]:
    """Return the lower quartile of the measurements of each kind that has enough of them."""
    return {kind: _lower_quartile(times) for kind, times in times_of.items() if len(times) >= _ENOUGH}


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]
