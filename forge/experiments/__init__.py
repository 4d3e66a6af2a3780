"""The chapters' experiments, one module each: its options, its run, its facts, and how they are drawn.

Module `kv_cache` is `forge kv-cache`, in the function of the module's name. Its docstring is the command's help; its
first line begins with the chapter's number.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.machinery import FileFinder
from pathlib import Path
from pkgutil import iter_modules
from typing import Any


@cache
def summaries() -> dict[str, str]:
    """Each command's summary in the order of the chapters, read from the files: no experiment is imported."""
    found = {}
    for module in iter_modules(__path__):
        assert isinstance(module.module_finder, FileFinder)
        folder = Path(module.module_finder.path)
        path = folder / module.name / "__init__.py" if module.ispkg else folder / f"{module.name}.py"
        with path.open(encoding="utf-8") as file:
            first = file.readline().strip().removeprefix('"""')
        if first[:1].isdigit():  # `bench` has commands of its own
            found[module.name.replace("_", "-")] = first
    return dict(sorted(found.items(), key=lambda item: int(item[1].partition(".")[0])))


def load(command: str) -> tuple[Callable[..., Any], str]:
    """The function that `forge COMMAND` runs, and its help."""
    name = command.replace("-", "_")
    module = import_module(f"{__name__}.{name}")
    return getattr(module, name), module.__doc__ or ""
