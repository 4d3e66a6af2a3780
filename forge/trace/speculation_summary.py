"""The draft cycles of a run in total: acceptance, tokens per forward, the speed-up measured and predicted.

Everything comes from records. The measured speed-up is plain decoding's time per token over speculation's, both by the
engine's own clock from the first token on. The speed-up is predicted twice: by the formula as it stands, in which
verifying K draft tokens costs as much as one row, and with the measured cost of verification. The difference between
the second prediction and the measured figure is work outside the models.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from forge.trace.records import DraftCycle, SpecCycle, StepRecord


@dataclass
class DraftTotals:
    """The sums of one proposer's cycles."""

    name: str
    cycles: int = 0
    won: int = 0
    """Cycles whose emitted tokens are this proposer's."""
    proposed: int = 0
    accepted: int = 0
    by_position: list[tuple[int, int]] = field(default_factory=list)
    """(accepted, proposed) of all first draft tokens, all second ones, …"""
    gained: int = 0
    """Accepted tokens beyond the best other proposer's, in the cycles that it won."""
    ms: float = 0.0
    """Time spent proposing."""

    def add(self, proposed: int, accepted: int, won: bool, best_other: int = 0) -> None:
        """Add a cycle, in which another proposer had `best_other` tokens accepted at most."""
        self.cycles += 1
        self.won += won
        self.proposed += proposed
        self.accepted += accepted
        self.gained += max(0, accepted - best_other) if won else 0
        self.by_position += [(0, 0)] * (proposed - len(self.by_position))
        for position in range(proposed):
            kept, all_proposed = self.by_position[position]
            self.by_position[position] = kept + (position < accepted), all_proposed + 1

    @property
    def acceptance(self) -> float:
        """The share of proposed tokens that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0


def add_cycles(totals: dict[str, DraftTotals], cycles: Sequence[SpecCycle] | Sequence[DraftCycle]) -> None:
    """Count the cycles of one sequence in one step, one per proposer."""
    for cycle in cycles:
        if cycle.num_proposed:
            best_other = max([rival.num_accepted for rival in cycles if rival is not cycle], default=0)
            total = totals.setdefault(cycle.proposer, DraftTotals(cycle.proposer))
            total.add(cycle.num_proposed, cycle.num_accepted, cycle.won, best_other)


def draft_totals(steps: Iterable[Sequence[SpecCycle]]) -> tuple[DraftTotals, ...]:
    """Return the totals of every proposer that proposed, from the cycles of each step."""
    totals: dict[str, DraftTotals] = {}
    for cycles in steps:
        by_sequence: dict[int, list[SpecCycle]] = defaultdict(list)
        for cycle in cycles:
            by_sequence[cycle.seq_id].append(cycle)
        for cycles_of_sequence in by_sequence.values():
            add_cycles(totals, cycles_of_sequence)
        for name, milliseconds in {cycle.proposer: cycle.draft_ms for cycle in cycles if cycle.proposed}.items():
            totals[name].ms += milliseconds
    return tuple(totals.values())


def undrafted_counts(records: Iterable[StepRecord]) -> dict[str, int]:
    """Count the decodes without draft tokens by reason: that of `Undrafted`, or of its decision."""
    return dict(
        Counter(
            undrafted.decision.reason if undrafted.decision is not None else undrafted.reason
            for record in records
            for undrafted in record.undrafted
        )
    )


@dataclass(frozen=True)
class DecodeTime:
    """The decode steps of a run: those after the first token, until the last."""

    num_tokens: int
    num_passes: int
    """The target's forward passes, counted for each sequence in them."""
    ms: float
    forward_ms: float
    """The target's forward pass, in the median step."""
    other_ms: float
    """A step's time outside the models, on average."""

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> "DecodeTime | None":
        """Measure a run; None if no step decoded every sequence."""
        decoding = [record for record in records if record.phase == "decode" and record.items]
        if not decoding:
            return None
        first = records[records.index(decoding[0]) - 1].ended if records[0] is not decoding[0] else decoding[0].started
        return cls(
            sum(len(record.tokens) for record in decoding),
            sum(len(record.items) for record in decoding),
            (decoding[-1].ended - first) * 1e3,
            median(record.forward_ms for record in decoding),
            ((decoding[-1].ended - first) * 1e3 - sum(record.forward_ms + _draft_ms(record) for record in decoding))
            / len(decoding),
        )

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.num_tokens

    @property
    def tokens_per_second(self) -> float:
        return 1e3 / self.ms_per_token


@dataclass(frozen=True)
class SpeculationSummary:
    """A run with speculation compared with a plain one of the same requests."""

    num_cycles: int
    proposed: int
    accepted: int
    emitted: int
    """Tokens that the cycles emitted."""
    accepted_by_position: tuple[tuple[int, int], ...]
    """(cycles that accepted it, cycles) of the first draft token, the second, …"""
    tested: int
    """Draft tokens that were looked at: those accepted, and the first rejected one of each cycle."""
    draft_ms: float
    """Proposing one token, for all sequences of a step together."""
    verify_ms: float
    """The target's forward of a cycle."""
    plain: DecodeTime
    speculative: DecodeTime
    drafting_share: float
    """The share of the decode steps that had a cycle."""
    drafted_per_step: float
    """Draft tokens of the longest cycle of each decode step, on average: the draft's passes per pass of the target."""

    @classmethod
    def of(cls, plain: Sequence[StepRecord], speculative: Sequence[StepRecord]) -> "SpeculationSummary | None":
        """Summarize two runs; None without a cycle, or without a plain run to compare with."""
        cycles = [cycle for cycle in cycles_of(speculative) if cycle.proposed]
        plain_time, speculative_time = DecodeTime.of(plain), DecodeTime.of(speculative)
        if not cycles or plain_time is None or speculative_time is None:
            return None
        won = [cycle for cycle in cycles if cycle.won]
        drafting = [record for record in speculative if any(cycle.proposed for cycle in record.cycles)]
        num_steps = sum(record.phase == "decode" and bool(record.items) for record in speculative)
        return cls(
            num_cycles=len(won),
            proposed=sum(len(cycle.proposed) for cycle in won),
            accepted=sum(cycle.num_accepted for cycle in won),
            emitted=sum(len(cycle.emitted) for cycle in won),
            accepted_by_position=_by_position(won),
            tested=sum(min(cycle.num_accepted + 1, len(cycle.proposed)) for cycle in won),
            draft_ms=median(_draft_ms(record) / _longest(record) for record in drafting),
            verify_ms=median(record.forward_ms for record in drafting),
            plain=plain_time,
            speculative=speculative_time,
            drafting_share=len(drafting) / num_steps,
            drafted_per_step=sum(_longest(record) for record in drafting) / num_steps,
        )

    @property
    def acceptance(self) -> float:
        """Accepted over proposed tokens, the rate that servers report. It falls as K grows."""
        return self.accepted / self.proposed

    @property
    def alpha(self) -> float:
        """Accepted over tested tokens: the α of Leviathan et al. 2023, which hardly depends on K."""
        return self.accepted / self.tested

    def expected_tokens(self, k: int) -> float:
        """Return (1 - α^(K + 1)) / (1 - α): the tokens that a cycle with K draft tokens emits on average, if each is
        accepted with probability α independently of the others."""
        return sum(self.alpha**power for power in range(k + 1))

    @property
    def mean_k(self) -> float:
        """The mean number of draft tokens per cycle."""
        return self.proposed / self.num_cycles

    @property
    def tokens_per_cycle(self) -> float:
        return self.emitted / self.num_cycles

    @property
    def tokens_per_pass(self) -> float:
        """The tokens of a sequence per pass of the target, passes without draft tokens included."""
        return self.speculative.num_tokens / self.speculative.num_passes

    @property
    def draft_cost(self) -> float:
        """The cost of a draft token, c = t_draft / t_target."""
        return self.draft_ms / self.plain.forward_ms

    @property
    def verify_cost(self) -> float:
        """The cost of a verifying forward, in plain forwards."""
        return self.verify_ms / self.plain.forward_ms

    @property
    def predicted(self) -> float:
        """The predicted speed-up: tokens per pass over 1 + (draft tokens per pass) · c. If each pass verifies K tokens,
        the divisor is 1 + K · c."""
        return self.tokens_per_pass / (1 + self.drafted_per_step * self.draft_cost)

    @property
    def predicted_with_verification(self) -> float:
        """The predicted speed-up with the measured cost of verification in place of the 1."""
        passes = 1 + self.drafting_share * (self.verify_cost - 1)
        return self.tokens_per_pass / (passes + self.drafted_per_step * self.draft_cost)

    def predicted_for(self, k: int) -> float:
        """Predict the speed-up with K draft tokens in each cycle. Each further row makes a verification more expensive
        by the same amount."""
        row = max(0.0, self.verify_cost - 1) / self.mean_k
        return self.expected_tokens(k) / (1 + k * (row + self.draft_cost))

    def best_k(self, most: int) -> int:
        """Return the K up to `most` with the greatest predicted speed-up; 0 if none is above 1."""
        best = max(range(1, most + 1), key=self.predicted_for)
        return best if self.predicted_for(best) > 1 else 0

    @property
    def measured(self) -> float:
        return self.plain.ms_per_token / self.speculative.ms_per_token


def cycles_of(records: Sequence[StepRecord]) -> list[SpecCycle]:
    """Return the cycles of all steps, in order."""
    return [cycle for record in records for cycle in record.cycles]


def _by_position(cycles: Sequence[SpecCycle]) -> tuple[tuple[int, int], ...]:
    longest = max(len(cycle.proposed) for cycle in cycles)
    return tuple((sum(cycle.num_accepted > index for cycle in cycles), len(cycles)) for index in range(longest))


def _draft_ms(record: StepRecord) -> float:
    """Return the time of all proposers of a step; each cycle has the time of its proposer's one call."""
    return sum({cycle.proposer: cycle.draft_ms for cycle in record.cycles}.values())


def _longest(record: StepRecord) -> int:
    return max(len(cycle.proposed) for cycle in record.cycles)
