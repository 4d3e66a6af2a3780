"""After passing: the reader's functions as source, and what they cost beside the engine's own."""

import ast
from collections.abc import Sequence
from pathlib import Path

from forge.exercises import session
from forge.exercises.catalog import Entry
from forge.exercises.cost import Measured


def compare_costs(entry: Entry, path: Path) -> list[Measured] | None:
    """Run the benchmark in a process of its own. None if the reader's code did not end it."""
    ended = session.in_child("cost", entry, path)
    if ended.result is None:
        return None
    return [
        Measured(str(cost["size"]), tuple(map(float, cost["yours"])), tuple(map(float, cost["reference"])))
        for cost in ended.result["costs"]
    ]


def source_of(path: Path, functions: Sequence[str]) -> str:
    """Return the source of the reader's functions, without docstrings."""
    text = path.read_text(encoding="utf-8")
    lines, shown = text.splitlines(), []
    for node in ast.parse(text).body:
        named = [(node.name, node)] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef):
            named = [(f"{node.name}.{item.name}", item) for item in node.body if isinstance(item, ast.FunctionDef)]
        for name, function in named:
            if name in functions:
                first = function.body[0]
                has_words = ast.get_docstring(function) is not None
                words = range(first.lineno - 1, first.end_lineno or first.lineno) if has_words else range(0)
                kept = range(function.lineno - 1, function.end_lineno or function.lineno)
                shown.append("\n".join(lines[index] for index in kept if index not in words))
    return "\n\n".join(shown)
