"""How many tokens to guess, sequence by sequence: as many as pay, and none where guessing loses.

A cycle of K guesses emits αK + 1 tokens, α being the share of guesses that is accepted, and costs one forward of the
target and K of the draft. So against plain decoding it gains the factor

    (αK + 1) / (1 + K · t_draft / t_target)

(Leviathan et al. 2023), where the target's forward over K + 1 rows is taken to cost what one over a single row does.
Here each further row has its price too. α depends on K, because guesses behind a rejected one are wasted: if each is
accepted with probability a after its predecessors were, αK = a + a² + … + a^K. What is estimated is a: accepted
guesses over guesses that the target decided about, recent cycles weighing more.

Hardly above 1 for every K, speculation goes off; after a pause, counted in output tokens, a single guess is tried. If
that is rejected the pause grows, up to a limit. So a useless draft costs a few guesses at first and ever fewer later.

`SpeculationControl` is a value: what happened goes in, the next value comes out, and no clock is read. Under sampling
the number of guesses decides which draws a token is made from, so there the caller passes costs that are fixed in
advance, and tokens never depend on the time.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from typing import NamedTuple

from forge.trace.records import SpecDecision, SpecReason

WINDOW = 50
"""Cycles that the acceptance rate is taken over."""
_FADING = 0.9
"""What a cycle counts for in the estimate of a, against the one after it."""
_FIRST_BELIEF = 0.7
"""What a is taken for before the first cycle, …"""
_BELIEF_GUESSES = 2.0
"""… as if so many guesses had shown it. Fades like a cycle."""
_WORTHWHILE = 1.05
"""A lesser gain is not worth it: it is smaller than what the costs leave out."""
_FIRST_PAUSE = 64
"""Output tokens before it is tried again for the first time. A probe is dear: the draft has to read what it missed."""
_LONGEST_PAUSE = 256
_PROVEN = 16
"""Cycles in a row after which what made it pause before is forgotten."""


@dataclass(frozen=True)
class Costs:
    """What speculation costs, in plain decode steps of the target."""

    guess: float
    """One guess: t_draft / t_target."""
    row: float = 0.0
    """What each further row adds to the target's forward."""


def speed_up(accept_rate: float, k: int, costs: Costs) -> float:
    """The formula: how many times faster cycles of `k` guesses are than plain decoding."""
    return (accept_rate * k + 1) / (1 + k * (costs.guess + costs.row))


def expected_accepted(acceptance: float, k: int) -> float:
    """How many of `k` guesses are accepted, if each is with probability `acceptance` once those before it were."""
    return sum(accumulate(repeat(acceptance, k), lambda product, factor: product * factor))


class Cycle(NamedTuple):
    """What became of one cycle's guesses."""

    proposed: int
    accepted: int

    @property
    def decided(self) -> int:
        """Guesses that the target looked at: up to the first that it rejected."""
        return min(self.accepted + 1, self.proposed)


class Belief(NamedTuple):
    """The estimate of a: guesses accepted, of those decided about. A cycle counts for less than the one after it."""

    accepted: float = _FIRST_BELIEF * _BELIEF_GUESSES
    decided: float = _BELIEF_GUESSES

    def after(self, cycle: Cycle) -> "Belief":
        return Belief(_FADING * self.accepted + cycle.accepted, _FADING * self.decided + cycle.decided)

    @property
    def acceptance(self) -> float:
        return self.accepted / self.decided


class RecentCycles(NamedTuple):
    """The last 50 cycles of a sequence, or of a draft. The sums are kept, because they are asked for every cycle."""

    cycles: tuple[Cycle, ...] = ()
    proposed: int = 0
    accepted: int = 0

    def add(self, proposed: int, accepted: int) -> "RecentCycles":
        cycles = (*self.cycles, Cycle(proposed, accepted))
        dropped = cycles[0] if len(cycles) > WINDOW else Cycle(0, 0)
        return RecentCycles(
            cycles[-WINDOW:],
            self.proposed + proposed - dropped.proposed,
            self.accepted + accepted - dropped.accepted,
        )

    @property
    def accept_rate(self) -> float | None:
        """`recent_accept_rate`: accepted over proposed; None before the first guess."""
        return self.accepted / self.proposed if self.proposed else None


NO_CYCLES, _NOTHING_SEEN = RecentCycles(), Belief()


@dataclass(frozen=True)
class SpeculationControl:
    """One sequence's state. `decision` says how many tokens to guess next; made by `begin`."""

    max_k: int
    fixed: bool
    decision: SpecDecision
    recent: RecentCycles = NO_CYCLES
    belief: Belief = _NOTHING_SEEN
    """From the cycles since it was last switched on."""
    trusted: int = 0
    """How many those are."""
    pause: int = _FIRST_PAUSE
    """Output tokens that the next pause will last."""

    @classmethod
    def begin(cls, max_k: int, costs: Costs, *, fixed: bool = False) -> "SpeculationControl":
        """max_k: guesses per cycle at most. fixed: always guess that many, whatever comes of it."""
        nothing_yet = SpecDecision(max_k, "fixed" if fixed else "wins", speed_up=1.0, accept_rate=None)
        return cls(max_k, fixed, nothing_yet)._decided(costs)

    @property
    def k(self) -> int:
        """Tokens to guess next; 0 while it is off."""
        return self.decision.k

    def after_cycle(self, proposed: int, accepted: int, costs: Costs) -> "SpeculationControl":
        """A cycle ended. One in which nothing was proposed says nothing."""
        if proposed == 0:
            return self
        recent, belief = self.recent.add(proposed, accepted), self.belief.after(Cycle(proposed, accepted))
        known = replace(self, recent=recent, belief=belief, trusted=self.trusted + 1)
        if self.decision.reason == "probes" and accepted == 0 and not self.fixed:
            return known._off(costs)
        if known.trusted == _PROVEN:
            known = replace(known, pause=_FIRST_PAUSE)
        return known._decided(costs)

    def after_plain_tokens(self, num_tokens: int, costs: Costs) -> "SpeculationControl":
        """Output tokens came without guesses. Where it is off, that is what it waits for."""
        if self.k > 0:
            return self
        left = self.decision.retry_in - num_tokens
        if left > 0:
            return replace(self, decision=replace(self.decision, reason="waits", retry_in=left))
        probe = self._decision(1, "probes", speed_up(_NOTHING_SEEN.acceptance, 1, costs))
        return replace(self, belief=_NOTHING_SEEN, trusted=0, decision=probe)

    def _decided(self, costs: Costs) -> "SpeculationControl":
        """With the best number of guesses for what is known now, or off."""
        predicted = self._predicted(costs)
        if self.fixed:
            return replace(self, decision=self._decision(self.max_k, "fixed", predicted[-1]))
        best = max(predicted)
        if best < _WORTHWHILE:
            return self._off(costs)
        k = 1 + predicted.index(best)
        reason: SpecReason = "wins" if k == self.max_k else "turned_down"
        if self.decision.reason == "probes":
            reason = "on_again"
        return replace(self, decision=self._decision(k, reason, best))

    def _off(self, costs: Costs) -> "SpeculationControl":
        could_win = speed_up(1, self.max_k, costs) > 1
        reason: SpecReason = "loses" if could_win else "cannot_win"
        decision = self._decision(0, reason, max(self._predicted(costs)), self.pause)
        longer = min(3 * self.pause, _LONGEST_PAUSE)
        return replace(self, decision=decision, belief=_NOTHING_SEEN, trusted=0, pause=longer)

    def _predicted(self, costs: Costs) -> list[float]:
        """What 1, 2, … `max_k` guesses would gain."""
        acceptance, each = self.belief.acceptance, costs.guess + costs.row
        product, accepted, gains = 1.0, 0.0, []
        for k in range(1, self.max_k + 1):
            product *= acceptance
            accepted += product
            gains.append((accepted + 1) / (1 + k * each))
        return gains

    def _decision(self, k: int, reason: SpecReason, predicted: float, retry_in: int | None = None) -> SpecDecision:
        return SpecDecision(k, reason, predicted, self.recent.accept_rate, retry_in)
