"""`python -m chapters.index`: write the table of what belongs to each chapter into chapters/README.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

from forge.book.bugs import bugs_of
from forge.book.catalog import Entry, entries
from forge.exercises import ENTRIES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "chapters" / "README.md"
HEADING = "| | text | run | pictures | bugs | exercises |\n| --- | --- | --- | --- | --- | --- |\n"
TOOLBOX = {"charts", "formatting", "json_output", "metrics", "palette", "progress", "run_view", "screen", "summary"} | {
    "terminal",
    "text",
}
"""Of `forge/views`, what every chapter draws with."""


def index() -> str:
    """The table: one row per chapter, with the files that are its own."""
    return HEADING + "".join(f"| {' | '.join(_cells(entry))} |\n" for entry in entries())


def _cells(entry: Entry) -> Iterator[str]:
    run = ROOT / "forge" / "experiments" / entry.command.replace("-", "_")
    files = sorted(run.glob("*.py")) if run.is_dir() else [run.with_suffix(".py")]
    pictures = sorted({name for file in files for name in _views(file)} - TOOLBOX)
    exercises = [exercise for exercise in ENTRIES if exercise.chapter == entry.command]
    yield str(entry.number)
    yield _link(entry.path, entry.path.name)
    yield _link(run if run.is_dir() else files[0], entry.command)
    yield ", ".join(_link(ROOT / "forge" / "views" / f"{name}.py", name) for name in pictures)
    yield ", ".join(_link(ROOT / "forge" / "book" / "bugs.py", name) for name in bugs_of(entry.command))
    links = ((exercise, ROOT / "forge" / "exercises" / f"{exercise.name}.py") for exercise in exercises)
    yield ", ".join(
        f"{_link(code, exercise.name)} ({_link(exercise.template, 'template')}, {_link(exercise.words, 'words')})"
        for exercise, code in links
    )


def _views(file: Path) -> Iterator[str]:
    """The modules of `forge.views` that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forge.views."):
            yield node.module.removeprefix("forge.views.") if node.module else ""


def _link(path: Path, text: str) -> str:
    assert path.exists(), path
    relative = path.relative_to(ROOT)
    return f"[{text}]({relative.name if relative.parent.name == 'chapters' else f'../{relative.as_posix()}'})"


def with_index(page: str) -> str:
    """The page with the table as it is now in the place of its own."""
    before, _, rest = page.partition(HEADING)
    rows = rest.partition("\n\n")
    return before + index() + "\n" + rows[2]


if __name__ == "__main__":
    PAGE.write_text(with_index(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
