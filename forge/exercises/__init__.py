"""Thirteen exercises: the reader writes a part of the engine, and the real engine runs on it.

An exercise is a module of this package: its check, and how the reader's part is put into an `LLM`
(`exercise.Exercise`). What the reader sees of it lies in `templates/`: the file to fill in, copied once and never
overwritten, and its rules, questions and hints (`.toml`). A check runs in a process of its own (`session`, `child`)
within limits of time and memory (`loading`).

A template ends with `check_file(__file__)`, so that it can be run alone.
"""

import sys
from pathlib import Path

from forge.exercises.catalog import ENTRIES, Entry, find_entry
from forge.exercises.loading import load

__all__ = ["ENTRIES", "Entry", "check_file", "find_entry", "load"]


def check_file(path: str) -> None:
    """Check the exercise in this file, print what came of it, and exit."""
    from forge.exercises.screens import print_result
    from forge.exercises.session import check
    from forge.views.terminal import open_console

    entry = find_entry(Path(path).name.partition("_")[0])
    result = check(entry, Path(path))
    print_result(open_console(), entry, result)
    sys.exit(0 if result.passed else 1)
