"""Dataclasses as options: a command that takes an `EngineArgs` has an option for each of its fields.

    @command
    def generate(prompt: Prompt, engine: EngineArgs, sampling: Annotated[SamplingParams, Takes(without="max_tokens")]):

Fields with the metadata of `forge.option` become options: name, type, default and help come from the field. `Takes`
names those of one command, and its own defaults.
"""

import builtins
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from forge.cli.completion import COMPLETIONS
from forge.needs import check_needs
from forge.option import flag_of
from forge.views.report import Report

_Made = TypeVar("_Made")
_CONTEXT = "ctx"
JSON_HELP = "Print one JSON object."
JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


class Takes:
    """The fields of a dataclass that a command takes, as words with spaces between them: those named, by name or by
    their heading, or all but those `without`. And the command's own defaults; a field with one that is not taken is
    fixed. unmade: the command checks the options and makes the dataclass itself; its parameter is None."""

    def __init__(self, names: str = "", *, without: str = "", unmade: bool = False, **defaults: Any):
        self.names, self.without, self.defaults = set(names.split()), set(without.split()), defaults
        self.unmade = unmade

    def fields_of(self, target: type) -> "list[Field[Any]]":
        options = [field for field in fields(target) if "help" in field.metadata]
        known = {word for field in options for word in (field.name, field.metadata["group"])}
        unknown = (self.names | self.without | self.defaults.keys()) - known
        assert not unknown, f"{target.__name__} has no {', '.join(sorted(unknown))}"
        return [
            field
            for field in options
            if (not self.names or self.names & {field.name, field.metadata["group"]}) and field.name not in self.without
        ]


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter that is a dataclass by its options, for typer to read. A function that returns a `Report`,
    and has no `json` parameter, gets `--json`."""
    parameters: list[Parameter] = []
    parts: dict[str, tuple[type, Takes]] = {}
    declared = signature(function, eval_str=True)
    for parameter in declared.parameters.values():
        target: Any
        target, *annotations = get_args(parameter.annotation) if _is_annotated(parameter) else (parameter.annotation,)
        has_fields = is_dataclass(target)
        if has_fields:
            takes = annotations[0] if annotations else Takes()
            parts[parameter.name] = target, takes
            parameters += [_option(field, target, takes) for field in takes.fields_of(target)]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
    context = next((parameter.name for parameter in parameters if parameter.annotation is typer.Context), None)
    if context is None:
        parameters.append(Parameter(_CONTEXT, Parameter.KEYWORD_ONLY, annotation=typer.Context))
    adds_json = declared.return_annotation is Report and all(parameter.name != "json" for parameter in parameters)
    if adds_json:
        parameters.append(Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption))

    @wraps(function)
    def run(**arguments: Any) -> Any:
        as_json = adds_json and arguments.pop("json")
        caller = arguments[context] if context is not None else arguments.pop(_CONTEXT)
        if caller is not None and not any(takes.unmade for _, takes in parts.values()):
            check_needs(*stated(caller, arguments, *(takes.defaults for _, takes in parts.values())))
        for name, (target, takes) in parts.items():
            values = {field.name: arguments.pop(field.name) for field in takes.fields_of(target)}
            arguments[name] = make(target, takes.defaults | values) if not takes.unmade else None
        report = function(**arguments)
        return report.as_json() if as_json else report

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def make(target: Callable[..., _Made], values: Mapping[str, Any], **changed: Any) -> _Made:
    """Build the dataclass from a command's parameters: None or an empty sequence means that an option was not given.
    `values` may have parameters of other dataclasses. Raises its `UsageError`."""
    names = [field.name for field in fields(target)]  # type: ignore[arg-type]
    stated = {name: values[name] for name in names if values.get(name) not in (None, [], ())}
    return target(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()} | changed
    )


def stated(
    context: typer.Context, values: Mapping[str, Any], *fixed: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str], dict[str, str]]:
    """Return what `check_needs` takes of a command line: every option's value, or what is fixed; the names of those
    that were given; and how each is spelled."""
    options = {name: value for defaults in fixed for name, value in defaults.items()}
    options |= {name: value for name, value in values.items() if value is not None or name not in options}
    spelled = {param.name: param.opts[0] for param in context.command.params if param.param_type_name == "option"}
    return options, {name for name in values if was_given(context, name)}, spelled


def was_given(context: typer.Context, name: str) -> bool:
    """Return whether the parameter was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _is_annotated(parameter: Parameter) -> bool:
    return get_origin(parameter.annotation) is Annotated


def _option(field: "Field[Any]", target: type, takes: Takes) -> Parameter:
    """Describe a field as typer describes options."""
    words, kind = field.metadata, _kind(field, target)
    default = takes.defaults.get(field.name, field.default)
    default = None if default == () else default
    flags = words["flags"].split() or [flag_of(field.name)]
    if kind is bool and default:
        flags = [f"{flags[0]}/--no-{flags[0][2:]}"]
    info = typer.Option(
        *flags,
        help=words["help"],
        rich_help_panel=words["group"] or None,
        show_default=default is not None or words["shown"] or False,
        metavar=words["metavar"],
        envvar=words["envvar"],
        autocompletion=COMPLETIONS.get(field.name),
        dir_okay=kind is not Path,
    )
    optional = Annotated[kind | None if default is None else kind, info]  # type: ignore[valid-type]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=optional)


def _kind(field: "Field[Any]", target: type) -> Any:
    """Return the type of the option's value on the command line: text if a field takes text or other things."""
    annotation = eval(field.type, {}, _Names(target)) if isinstance(field.type, str) else field.type
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = {get_origin(member) or member for member in members}
    if kinds & {Sequence, tuple}:
        return list[str]
    if get_origin(annotation) is Literal:
        return annotation
    return next((kind for kind in (str, bool, int, float, Path) if kind in kinds), str)


class _Names(dict[str, Any]):
    """The names of a dataclass's module; those that only a type checker imports are `object`."""

    def __init__(self, target: type):
        super().__init__(vars(sys.modules[target.__module__]))

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, object)
