"""The grammar of a comparison: exactly one option is given as `A vs B`, every other option holds for both sides.

    forge compare --kv off vs on "The fox and the lantern" 64
    forge compare --chunked-prefill vs --no-chunked-prefill --prompt-tokens 400 --max-num-batched-tokens 128

A switch varies as `--switch vs --no-switch`, or as `--switch on vs off`. `VersusCommand` splits such a command line
into two ordinary ones, which differ in that option alone, and parses both with the same parser. So every option of the
command can vary, each value is checked like any other, and an option added to the command later needs nothing here.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from typer import Context
from typer.core import TyperOption

from forge.cli.parsing import Command, Word, asks_for_help
from forge.errors import UsageError

WORD = "vs"
_EXAMPLE = f"for example: forge compare --kv off {WORD} on"
_TWO_SIDES = f"a comparison has two sides, {_EXAMPLE}"
_META = "forge.versus"
_NO_SIDES = ("json", "help")
"""Switches of the command, not of a side."""
_ON_OFF = {"on": True, "off": False}


@dataclass(frozen=True)
class Switch:
    """The meaning of one spelling of a switch."""

    option: str
    """The option's first name: `--chunked-prefill`."""
    on: bool


@dataclass(frozen=True)
class SplitLine:
    """One command line as two that differ in the value of `option`."""

    option: str
    """The option's first name: `--kv`."""
    names: tuple[str, str]
    """The two values as they were written; a switch's are on and off."""
    left: tuple[str, ...]
    right: tuple[str, ...]


@dataclass(frozen=True)
class Versus:
    """The arguments of a comparison's right side, beside the command's own, which are those of the left side."""

    option: str
    names: tuple[str, str]
    right: MutableMapping[str, Any]
    """The right side's parsed parameters, by name."""


class VersusCommand(Command):
    """A command of which one option takes two values. Its function asks `versus_of` for the other side."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        value_options = self.value_options()
        switches = self._switches()
        # The parser explains an option at the end without its value.
        if ctx.resilient_parsing or asks_for_help(args) or (args and "--" not in args and args[-1] in value_options):
            return super().parse_args(ctx, args)
        self.explain(ctx.command_path, args)
        split = split_versus(args, value_options, switches)
        right = self.context_class(self, info_name=ctx.info_name, parent=ctx.parent)
        with right.scope(cleanup=False):
            super().parse_args(right, list(split.right))
        ctx.meta[_META] = Versus(split.option, split.names, right.params)
        return super().parse_args(ctx, list(split.left))

    def words(self, args: Sequence[str]) -> list[Word] | None:
        """Return the words except those around `vs`, which belong to an option."""
        switches, words = self._switches(), super().words(args)
        sides: set[int] = set()
        for at in _word_positions(args):
            sides |= {at, at + 1} | ({at - 1} if at > 1 and args[at - 2] in switches else set())
        return None if words is None else [word for word in words if word.position not in sides]

    def _switches(self) -> dict[str, "Switch"]:
        """Map every spelling to its switch, for the switches that the run depends on."""
        options = [param for param in self.params if isinstance(param, TyperOption) and param.is_flag]
        return {
            spelling: Switch(option.opts[0], spelling in option.opts)
            for option in options
            if option.name not in _NO_SIDES
            for spelling in (*option.opts, *option.secondary_opts)
        }


def versus_of(ctx: Context) -> Versus:
    """Return the comparison that the command of `ctx` was asked for."""
    return ctx.meta[_META]


def split_versus(args: Sequence[str], value_options: Mapping[str, str], switches: Mapping[str, Switch]) -> SplitLine:
    """Find the one `OPTION A vs B` (or `OPTION=A vs B`, or `--switch vs --no-switch`) among `args`, wherever it stands.

    `value_options` maps the spellings of options that take a value to their first spelling. Raises `UsageError` if
    nothing varies, more than one option does, or a side is missing.
    """
    words = _word_positions(args)
    if not words:
        raise UsageError(f"nothing to compare: give one option two values, {_EXAMPLE}")
    varied = [_switched_at(args, at, switches) or _varied_at(args, at, value_options) for at in words]
    if len(varied) > 1:
        *options, last = (split.option for split in varied)
        why = "so the difference could not be ascribed to one of them: give one alone"
        raise UsageError(f"{', '.join(options)} and {last} vary, {why} as A {WORD} B")
    return varied[0]


def _word_positions(args: Sequence[str]) -> list[int]:
    end = args.index("--") if "--" in args else len(args)
    return [position for position, arg in enumerate(args[:end]) if arg.lower() == WORD]


def _switched_at(args: Sequence[str], word: int, switches: Mapping[str, Switch]) -> SplitLine | None:
    """Return the comparison of a switch around the `vs` at position `word`; None if what stands before is none."""
    before, after = (args[word - 1] if word else ""), (args[word + 1] if word + 1 < len(args) else "")
    if before in switches:
        start, switch = word - 1, switches[before]
        opposite = switches.get(after)
        sides = [switch.on, opposite.on] if opposite is not None and opposite.option == switch.option else []
    elif word > 1 and args[word - 2] in switches:
        start, switch = word - 2, switches[args[word - 2]]
        sides = [_ON_OFF[value.lower()] for value in (before, after) if value.lower() in _ON_OFF]
    else:
        return None
    option = switch.option
    if set(sides) != {True, False}:
        raise UsageError(f"{option} is a switch: write {option} on {WORD} off, {_EXAMPLE}")
    left_of, right_of = args[:start], args[word + 2 :]
    if any(arg in switches and switches[arg].option == option for arg in (*left_of, *right_of)):
        raise UsageError(f"{option} is given more than once: {_TWO_SIDES}")
    spelled = {switch.on: (spelling,) for spelling, switch in switches.items() if switch.option == option}
    left, right = ((*left_of, *spelled.get(on, ()), *right_of) for on in sides)
    return SplitLine(option, ("on", "off") if sides[0] else ("off", "on"), left, right)


def _varied_at(args: Sequence[str], word: int, value_options: Mapping[str, str]) -> SplitLine:
    """Return the comparison around the `vs` at position `word`."""
    before = args[word - 1] if word else ""
    if word > 1 and args[word - 2].lower() == WORD:
        raise UsageError(_TWO_SIDES)
    if before in value_options:
        raise UsageError(f"{before} has no value before {WORD!r}: write {before} A {WORD} B, {_EXAMPLE}")
    option, joined, value = before.partition("=")
    if joined and option in value_options:
        start = word - 1
    elif word > 1 and args[word - 2] in value_options:
        start, option, value = word - 2, args[word - 2], before
    else:
        named = next((arg for arg in (option, args[max(word - 2, 0)]) if arg.startswith("--")), None)
        if named is not None:
            raise UsageError(f"{named} is no option with a value here, so it cannot vary: give one that is, {_EXAMPLE}")
        raise UsageError(f"{WORD!r} stands between the two values of one option, {_EXAMPLE}")
    if word + 1 >= len(args) or _option_of(args[word + 1], value_options):
        raise UsageError(f"{option} has no value after {WORD!r}: write {option} {value} {WORD} B, {_EXAMPLE}")
    right_value, left_of, right_of = args[word + 1], args[:start], args[word + 2 :]
    if any(_option_of(arg, value_options) == value_options[option] for arg in (*left_of, *right_of)):
        raise UsageError(f"{option} is given more than once: {_TWO_SIDES}")
    left, right = ((*left_of, option, side, *right_of) for side in (value, right_value))
    return SplitLine(value_options[option], (value, right_value), left, right)


def _option_of(arg: str, value_options: Mapping[str, str]) -> str | None:
    """Return the option that `arg` names, alone or as `OPTION=VALUE`."""
    return value_options.get(arg.partition("=")[0])
