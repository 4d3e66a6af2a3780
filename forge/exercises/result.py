"""What a check found, as data: a child process prints it as JSON, and `--json` shows it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """Of one check."""

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
    printed: str = ""
    """What the reader's code printed, the last lines of it."""
