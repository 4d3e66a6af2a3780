"""The reader's other parts: the exercises that have passed in the same folder."""

from pathlib import Path
from types import ModuleType

from forge.exercises.catalog import ENTRIES, Entry
from forge.exercises.loading import load
from forge.exercises.session import load_builds


def passed_entries(folder: Path) -> tuple[Entry, ...]:
    """List the exercises of this folder that have passed and whose files still exist."""
    passed = load_builds(folder).passed
    return tuple(entry for entry in ENTRIES if entry.number in passed and (folder / entry.file_name).is_file())


def passed_part(piece: ModuleType, name: str) -> ModuleType | None:
    """Import another exercise's file from this folder; None if it has not passed."""
    folder = Path(str(piece.__file__)).parent
    entry = next((passed for passed in passed_entries(folder) if passed.name == name), None)
    return None if entry is None else load(folder / entry.file_name)
