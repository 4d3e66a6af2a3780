"""What a check found, as data: a child process prints it as JSON, and `--json` shows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["right", "wrong", "not written", "not checked"]


@dataclass(frozen=True)
class Result:
    """The outcome of one check."""

    number: int
    name: str
    passed: bool
    rule: str | None = None
    """The name of the rule that is broken."""
    sentence: str = ""
    """The rule."""
    found: str = ""
    calls: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    line: str | None = None
    """The reader's line, where there is one."""
    question: str = ""
    functions: Mapping[str, State] = field(default_factory=dict)
    """The state of each function of the exercise."""
    printed: str = ""
    """What the reader's code printed, the last lines of it."""
    changed: bool = False
    """Whether the exercise has changed since the reader's file was begun."""
