"""Solutions of the exercises: a right one, and wrong ones that each differ from it in one place."""

from pathlib import Path
from typing import NamedTuple

from forge.exercises import find_entry
from forge.exercises.child import check_here
from forge.exercises.result import Result

_FOLDER = Path(__file__).parent / "solutions"


class Wrong(NamedTuple):
    """A mistake: what stands in the right solution, what stands in its place, and the rule that the message names."""

    mistake: str
    old: str
    new: str
    rule: str


def right(name: str) -> str:
    """The right solution's source."""
    return (_FOLDER / f"{name}.py").read_text(encoding="utf-8")


def checked(name: str, source: str, folder: Path) -> Result:
    """What the check says of this source."""
    entry = find_entry(name)
    path = folder / entry.file_name
    path.write_text(source, encoding="utf-8")
    return check_here(entry, path)


def check_right(name: str, folder: Path) -> None:
    result = checked(name, right(name), folder)
    assert result.passed, f"{result.rule}: {result.found}\n{result.line}\n" + "\n".join(result.calls)


def check_wrong(name: str, wrong: Wrong, folder: Path) -> Result:
    """The mistake is found, under the rule that names it, with a question and no more than a screen of calls."""
    source = right(name)
    assert source.count(wrong.old) == 1, f"{wrong.old!r} is in the right solution {source.count(wrong.old)} times"
    result = checked(name, source.replace(wrong.old, wrong.new), folder)
    said = f"{result.rule}: {result.found}\n{result.line}\n" + "\n".join(result.calls)
    assert not result.passed and result.rule == wrong.rule, said
    assert result.sentence and result.question and len(result.calls) <= 16, said
    return result
