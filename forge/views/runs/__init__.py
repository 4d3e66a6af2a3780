"""Views of a whole run, one module each, which `forge replay FILE --view NAME` shows.

Module `NAME` has `view(history)`, which returns a `Report`; the first line of its docstring says what that shows. To
add a view is to add a file here.
"""

from importlib import import_module

from forge.drop_ins import first_lines
from forge.errors import UsageError
from forge.views.history import History
from forge.views.report import Report


def view_report(name: str, history: History) -> Report:
    """The view of that name. Raises `UsageError` for an unknown name, with a list of the known ones."""
    known = first_lines(__path__)
    if name not in known:
        unknown = UsageError(f"unknown view {name!r}; there are {', '.join(known)}")
        for one, what in known.items():
            unknown.add_note(f"  {one:12}{what}")
        raise unknown
    return import_module(f"{__name__}.{name}").view(history)
