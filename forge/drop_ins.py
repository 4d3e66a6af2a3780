"""Modules that are found by their files: chapters' experiments, benchmarks, views of a run. None is imported to be
listed: the first line of its docstring says what it is.
"""

from collections.abc import Sequence
from functools import cache
from importlib.machinery import FileFinder
from pathlib import Path
from pkgutil import iter_modules


def first_lines(folders: Sequence[str]) -> dict[str, str]:
    """Map each module to the first line of its docstring."""
    return dict(_first_lines(tuple(folders)))


@cache
def _first_lines(folders: tuple[str, ...]) -> dict[str, str]:
    lines = {}
    for module in iter_modules(folders):
        assert isinstance(module.module_finder, FileFinder)
        folder = Path(module.module_finder.path)
        path = folder / module.name / "__init__.py" if module.ispkg else folder / f"{module.name}.py"
        with path.open(encoding="utf-8") as file:
            lines[module.name] = file.readline().strip().removeprefix('"""').removesuffix('"""')
    return lines
