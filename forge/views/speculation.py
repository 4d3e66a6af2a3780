"""A run with draft tokens as text: which of its tokens were drafted, and which draft tokens were rejected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from forge.trace.records import SpecCycle, StepRecord, TokenRecord, Undrafted
from forge.views.palette import GOOD, QUIET
from forge.views.text import neutralise

TokenText = Callable[[int], str]


@dataclass(frozen=True)
class Step:
    """One cycle, or one plain step, with the texts of its tokens."""

    number: int
    tokens: tuple[TokenRecord, ...]
    cycles: tuple[SpecCycle, ...]
    undrafted: tuple[Undrafted, ...] = ()

    @property
    def winner(self) -> SpecCycle | None:
        """The cycle that the tokens are from; None for a step without draft tokens."""
        return next((cycle for cycle in self.cycles if cycle.won and cycle.proposed), None)

    @property
    def num_accepted(self) -> int:
        """The step's tokens that are accepted draft tokens."""
        cycle = self.winner
        return min(cycle.num_accepted, len(self.tokens)) if cycle else 0

    @property
    def rejected(self) -> tuple[int, ...]:
        """The rejected draft tokens."""
        cycle = self.winner
        return cycle.proposed[cycle.num_accepted :] if cycle else ()


def steps_of(records: Sequence[StepRecord]) -> list[Step]:
    numbered = enumerate(records, start=1)
    return [Step(number, record.tokens, record.cycles, record.undrafted) for number, record in numbered]


def marked_text(steps: Sequence[Step], token_text: TokenText) -> Text:
    """Return what was said: [accepted draft tokens], ~the first that was rejected~, and the target's own tokens as they
    are."""
    text = Text()
    open_bracket = False
    for step in steps:
        for index, token in enumerate(step.tokens):
            accepted = index < step.num_accepted
            if accepted != open_bracket:
                text.append("[" if accepted else "]", QUIET)
                open_bracket = accepted
            if not accepted and step.rejected:
                text.append(f" ~{neutralise(token_text(step.rejected[0])).strip()}~", f"{QUIET} strike")
            text.append(neutralise(token.text), GOOD if accepted else "default")
    if open_bracket:
        text.append("]", QUIET)
    return text
