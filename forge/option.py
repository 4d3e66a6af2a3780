"""`option`: a dataclass field that says what the command line shows of it.

An option stands once, as such a field: name, type, default, help. `LLM`'s keywords, the server's settings and the
options of the commands all come from it. What is here is plain text; `forge.cli.arguments` makes the command line of
it. A field without it is an argument in Python alone.
"""

from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str,
    group: str = "",
    *,
    flags: str = "",
    shown: str = "",
    metavar: str | None = None,
    envvar: str | None = None,
) -> Any:
    """Declare a field with a default and a help text.

    group: the heading that it stands under in a command's help; without one it comes first. flags: how it is spelled,
    if not like its name. shown: what the help says of a default that is None. metavar: what the help calls its value.
    envvar: the variable that it comes from if it is not given. What it means nothing without is in `forge.needs`.
    """
    words = {"help": help, "group": group, "flags": flags, "shown": shown}
    return field(default=default, metadata={**words, "metavar": metavar, "envvar": envvar})


def flag_of(name: str) -> str:
    """Return how an option is spelled by default: `max_model_len` is `--max-model-len`."""
    return f"--{name.replace('_', '-')}"
