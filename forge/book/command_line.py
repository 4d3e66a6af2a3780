"""The options that a reader gave a chapter, put into the command lines of its experiments.

forge naive "The fox" --model mine.gguf      the chapter, with this prompt and model in every run that takes them
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_VERSUS = "vs"


@dataclass(frozen=True)
class Syntax:
    """The parameters that a command takes."""

    positionals: tuple[str, ...]
    """The names of its arguments, in order."""
    options: Mapping[str, str]
    """Every spelling of every option that takes a value → its parameter's name."""


@dataclass(frozen=True)
class Given:
    """The options that a reader gave, by parameter name, spelled as on a command line; a tuple for an option given
    several times."""

    values: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)

    def applied(self, args: Sequence[str], syntax: Syntax) -> list[str]:
        """Return a command's `args` with the reader's options in place of its own.

        An option of which the line compares two values stays as it is: that is what the line is about.
        """
        positionals: list[str] = []
        kept: list[str] = []
        varied: set[str] = set()
        index = 0
        while index < len(args):
            arg = args[index]
            spelling, joined, _ = arg.partition("=")
            name = syntax.options.get(spelling)
            length = 1 if name is None or joined else 2
            if name is not None and args[index + length : index + length + 1] == [_VERSUS]:
                length += 2
                varied.add(name)
            if name is None and not arg.startswith("--"):
                positionals.append(arg)
            elif name is None or name in varied or name not in self.values:
                kept += args[index : index + length]
            index += length
        return [*self._positionals(positionals, syntax), *kept, *self._options(syntax, varied)]

    def _positionals(self, typed: Sequence[str], syntax: Syntax) -> list[str]:
        """Return positionals up to the last one that either side has; one in between that neither has ends the list."""
        values: list[str] = []
        for index, name in enumerate(syntax.positionals):
            if name in self.values:
                values += each(self.values[name])
            elif index < len(typed):
                values.append(typed[index])
            else:
                break
        return values

    def _options(self, syntax: Syntax, varied: set[str]) -> list[str]:
        first = {name: spelling for spelling, name in reversed(list(syntax.options.items()))}
        names = [name for name in self.values if name in first and name not in varied]
        return [word for name in names for value in each(self.values[name]) for word in (first[name], value)]


def each(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
