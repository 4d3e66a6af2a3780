"""The chapters' experiments, one module each: its options, its run, its facts, and how they are drawn.

Module `kv_cache` is `forge kv-cache`, in the function of the module's name. Its docstring is the command's help; its
first line begins with the chapter's number.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from forge.drop_ins import first_lines


def summaries() -> dict[str, str]:
    """Return each command's summary, in the order of the chapters."""
    numbered = [(name, first) for name, first in first_lines(__path__).items() if first[:1].isdigit()]
    ordered = sorted(numbered, key=lambda item: int(item[1].partition(".")[0]))
    return {name.replace("_", "-"): first for name, first in ordered}


def load(command: str) -> tuple[Callable[..., Any], str]:
    """Return the function that `forge COMMAND` runs, and its help."""
    name = command.replace("-", "_")
    module = import_module(f"{__name__}.{name}")
    return getattr(module, name), module.__doc__ or ""
