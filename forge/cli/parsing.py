"""The parser of every command, which explains two slips: an option without its value, and a text without its quotes.

forge generate --kv --seed 3 Once 2        --kv would take --seed for its value, and 3 would be the prompt
forge generate Once upon a time 32         the shell makes five words of it, and upon would be MAX_TOKENS
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperOption

from forge.errors import UsageError

TEXTS = ("PROMPT", "TEXT", "CONTINUATION", "TERM")
"""Arguments that are texts, by what the help calls them."""
_TEXT_OPTIONS = ("--system", "--query", "-q", "--instruction")
"""Options whose value may be several words, of commands whose arguments are no texts."""
_LOOKS_LIKE_AN_OPTION = re.compile(r"--[a-z][\w-]*(=.*)?", re.DOTALL)


class Word(NamedTuple):
    """An argument of a command line: neither an option nor an option's value."""

    position: int
    """Its index on the line."""
    text: str
    option: str | None
    """The option whose value stands directly before it."""


class Command(TyperCommand):
    """A command that explains these two slips before anything else is parsed. Raises `UsageError`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and not asks_for_help(args):
            self.explain(ctx.command_path, args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", self) is None:  # an option at the end without its value
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def explain(self, path: str, args: Sequence[str]) -> None:
        """Raise `UsageError` for an option without its value and for a text without quotes."""
        self._check_values(args)
        words = self.words(args)
        if words is not None:
            self._check_quotes(path, args, words)

    def value_options(self) -> dict[str, str]:
        """Map every spelling of every option that takes a value to that option's first spelling."""
        options = [param for param in self.params if isinstance(param, TyperOption) and not param.is_flag]
        return {spelling: option.opts[0] for option in options for spelling in option.opts}

    def words(self, args: Sequence[str]) -> list[Word] | None:
        """Return the arguments on a command line; None if it has an option that the command does not know."""
        taking, known = self.value_options(), self._spellings()
        words: list[Word] = []
        option, end = None, 0
        for position, takes_value in self._walk(args):
            arg, end = args[position], position + 1 + takes_value
            if takes_value:
                option = arg
                continue
            if len(arg) > 1 and arg[0] == "-":
                if arg.partition("=")[0] not in known and (arg[:2] == "--" or arg[:2] not in taking):
                    return None
            else:
                words.append(Word(position, arg, option))
            option = None
        return [*words, *(Word(at, args[at], None) for at in range(end + 1, len(args)))]  # those after `--`

    def _walk(self, args: Sequence[str]) -> Iterator[tuple[int, bool]]:
        """Yield the position of each argument before `--` that is no option's value, and whether a value follows it."""
        taking, position = self.value_options(), 0
        while position < len(args) and args[position] != "--":
            yield position, args[position] in taking
            position += 1 + (args[position] in taking)

    def _spellings(self) -> set[str]:
        options = [param for param in self.params if isinstance(param, TyperOption)]
        return {"--help"} | {spelling for option in options for spelling in (*option.opts, *option.secondary_opts)}

    def _check_values(self, args: Sequence[str]) -> None:
        known = self._spellings()
        for position, takes_value in self._walk(args):
            value = args[position + 1] if takes_value and position + 1 < len(args) else ""
            if value in known or _LOOKS_LIKE_AN_OPTION.fullmatch(value):
                raise without_value(args[position], f"{value} stands in its place")

    def _check_quotes(self, path: str, args: Sequence[str], words: Sequence[Word]) -> None:
        arguments: list[Any] = [param for param in self.params if param.param_type_name == "argument"]
        if any(argument.nargs != 1 for argument in arguments):
            return
        too_many = len(words) - len(arguments)
        texts = [argument for argument in arguments if argument.metavar in TEXTS]
        if not texts and too_many > 0:
            self._check_quotes_of_option(args, words, too_many)
        if not texts or not words:
            return
        numbers = [argument for argument in arguments if argument not in texts]
        at_end = words[len(texts) : len(arguments)]
        not_whole = next((word.text for word in at_end if not is_whole(word.text)), None)
        if not_whole is not None:
            mistake = f"{numbers[0].metavar} is a whole number, and {not_whole!r} is none"
        elif too_many > 0:
            mistake = f"{words[len(arguments)].text!r} is one argument too many"
        else:
            return
        if too_many <= 0 and any(char.isspace() for word in words[: len(texts)] for char in word.text):
            raise UsageError(f"{mistake} (see {path} --help)")
        names = " or ".join(argument.metavar for argument in texts)
        line = self._quoted_line(path, args, words, len(texts), bool(numbers))
        raise UsageError(f"{mistake}: quote a {names} of several words: {line}")

    @staticmethod
    def _quoted_line(path: str, args: Sequence[str], words: Sequence[Word], num_texts: int, with_number: bool) -> str:
        """Return the command line with its words in quotes, as `num_texts` texts and, if the last is one, a number."""
        number = [word.text for word in words[-1:] if with_number and is_whole(word.text)]
        spoken = [word.text for word in words[: len(words) - len(number)]]
        first = len(spoken) - num_texts + 1
        texts = [" ".join(spoken[:first]), *spoken[first:]]
        taken = {word.position for word in words}
        options = [arg for position, arg in enumerate(args) if position not in taken and arg != "--"]
        end_of_options = ["--"] if any(text.startswith("-") for text in texts) else []
        return " ".join([path, *map(shlex.quote, options), *end_of_options, *map(quoted, texts), *number])

    @staticmethod
    def _check_quotes_of_option(args: Sequence[str], words: Sequence[Word], too_many: int) -> None:
        for at, word in enumerate(words):
            if word.option in _TEXT_OPTIONS:
                value = " ".join([args[word.position - 1], *(spoken.text for spoken in words[at : at + too_many])])
                mistake = f"{word.text!r} is one argument too many"
                raise UsageError(f"{mistake}: quote a value of several words: {word.option} {quoted(value)}")


def without_value(option: str, instead: str = "") -> UsageError:
    """Build the error of an option without a value. Of `--kv` it lists the values."""
    if option == "--kv":
        from forge.engine_args import KV_KINDS  # only an error needs it, and every command imports this module

        error = UsageError(f"--kv takes one of {', '.join(KV_KINDS)}" + (f", and {instead}" if instead else ""))
        for kind, meaning in KV_KINDS.items():
            error.add_note(f"  {kind:8}{meaning}")
        return error
    spelling = f" (a value with dashes is written {option}=--…)" if option.startswith("--") else ""
    return UsageError(f"{option} has no value: {instead}{spelling}")


def asks_for_help(args: Sequence[str]) -> bool:
    return "--help" in (args[: args.index("--")] if "--" in args else args)


def quoted(text: str) -> str:
    """`text` in the quotation marks that a reader expects, where a shell leaves it alone in them."""
    return f'"{text}"' if not set(text) & set('"$`\\!') else shlex.quote(text)


def command_of(function: Callable[..., Any], name: str, parser: type[Command] = Command, **more: Any) -> TyperCommand:
    """Make a function the command `name`, with this parser or one of its kind. more: what typer takes of a command."""
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, cls=parser, **more)(function)
    command = typer.main.get_command(alone)
    assert isinstance(command, TyperCommand)
    return command


def adopt(commands: Iterable[Any]) -> None:
    """Give the commands of a `typer.Typer` this parser."""
    for command in commands:
        if command.cls is TyperCommand:
            command.cls = Command


def is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
