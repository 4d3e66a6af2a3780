"""The reader's other parts: what has passed in the same folder."""

from pathlib import Path
from types import ModuleType

from forge.exercises.catalog import ENTRIES, Entry
from forge.exercises.loading import load
from forge.exercises.session import load_builds


def passed_entries(folder: Path) -> tuple[Entry, ...]:
    """The exercises of this folder that have passed and are still there."""
    passed = load_builds(folder).passed
    return tuple(entry for entry in ENTRIES if entry.number in passed and (folder / entry.file_name).is_file())


def passed_part(piece: ModuleType, name: str) -> ModuleType | None:
    """Another exercise's file beside this one, if it has passed."""
    folder = Path(str(piece.__file__)).parent
    entry = next((passed for passed in passed_entries(folder) if passed.name == name), None)
    return None if entry is None else load(folder / entry.file_name)
