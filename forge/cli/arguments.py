"""Dataclasses as options: a command that takes an `EngineArgs` has an option for each of its fields.

    @command
    def generate(prompt: Prompt, engine: EngineArgs, sampling: Annotated[SamplingParams, Takes(without="max_tokens")]):

Fields with the metadata of `forge.option` become options: name, type, default and help come from the field. `Takes`
names those of one command, and its own defaults. typer reads a command's options from its signature, so `command`
writes them there. An `Annotated` alias per option would be longer: 37 commands take 474 options, of 149 fields that
`LLM` and the server need all the same.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from forge.cli.completion import COMPLETIONS
from forge.option import check_needs, flag_of
from forge.views.screen import Report

_Owner = TypeVar("_Owner")
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

    def fields_of(self, owner: type) -> "list[Field[Any]]":
        options = [field for field in fields(owner) if "help" in field.metadata]
        known = {word for field in options for word in (field.name, field.metadata["group"])}
        unknown = (self.names | self.without | self.defaults.keys()) - known
        assert not unknown, f"{owner.__name__} has no {', '.join(sorted(unknown))}"
        named = [field for field in options if not self.names or self.names & {field.name, field.metadata["group"]}]
        return [field for field in named if field.name not in self.without]


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter that is a dataclass by its options, for typer to read. A function that returns a `Report`
    gets `--json`, if it has none, and the report is drawn as JSON where that is given."""
    shape = signature(function, eval_str=True)
    parameters: dict[str, Parameter] = {}
    parts: dict[str, tuple[type, Takes]] = {}
    for name, parameter in shape.parameters.items():
        owner, *takes = get_args(parameter.annotation) or (parameter.annotation,)
        if is_dataclass(owner):
            assert isinstance(owner, type)
            parts[name] = owner, takes[0] if takes else Takes()
            parameters |= {field.name: _option(field, parts[name][1]) for field in parts[name][1].fields_of(owner)}
        else:
            parameters[name] = parameter.replace(kind=Parameter.KEYWORD_ONLY)
    adds_context = typer.Context not in (parameter.annotation for parameter in parameters.values())
    adds_json = shape.return_annotation is Report and "json" not in parameters
    if adds_context:
        parameters[_CONTEXT] = Parameter(_CONTEXT, Parameter.KEYWORD_ONLY, annotation=typer.Context)
    if adds_json:
        parameters["json"] = Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)
    context_name = next(name for name, parameter in parameters.items() if parameter.annotation is typer.Context)

    @wraps(function)
    def run(**values: Any) -> Any:
        as_json = values.pop("json") if adds_json else values.get("json")
        context = values.pop(context_name) if adds_context else values[context_name]
        if context is not None and not any(takes.unmade for _, takes in parts.values()):
            check_needs(*stated(context, values, *(takes.defaults for _, takes in parts.values())))
        for name, (owner, takes) in parts.items():
            options = {field.name: values.pop(field.name) for field in takes.fields_of(owner)}
            values[name] = None if takes.unmade else make(owner, takes.defaults | options)
        found = function(**values)
        return found.as_json() if as_json and isinstance(found, Report) else found

    run.__signature__ = Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def make(owner: Callable[..., _Owner], values: Mapping[str, Any], **changed: Any) -> _Owner:
    """Build the dataclass from a command's parameters: None or an empty sequence means that an option was not given.
    `values` may have parameters of other dataclasses. Raises its `UsageError`."""
    names = [field.name for field in fields(owner)]  # type: ignore[arg-type]
    chosen = {name: values[name] for name in names if values.get(name) not in (None, [], ())}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}
    return owner(**plain | changed)


def stated(
    context: typer.Context, values: Mapping[str, Any], *fixed: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str], dict[str, str]]:
    """Return what `check_needs` takes of a command line: every option's value, or what is fixed; the names of those
    that were given; and how each is spelled."""
    options = {name: value for defaults in fixed for name, value in defaults.items()}
    options |= {name: value for name, value in values.items() if value is not None or name not in options}
    spelled = {str(param.name): param.opts[0] for param in context.command.params if param.param_type_name == "option"}
    return options, {name for name in values if was_given(context, name)}, spelled


def was_given(context: typer.Context, name: str) -> bool:
    """Return whether the parameter was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(field: "Field[Any]", takes: Takes) -> Parameter:
    """Describe a field as typer describes options."""
    words, kind = field.metadata, _kind(field)
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
    annotation = Annotated[kind | None if default is None else kind, info]  # type: ignore[valid-type]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind(field: "Field[Any]") -> Any:
    """Return the type of the option's value on the command line: text if a field takes text or other things."""
    if get_origin(field.type) is Literal:
        return field.type
    words = set(re.findall(r"\w+", str(field.type)))
    if words & {"Sequence", "tuple"}:
        return list[str]
    return next((kind for kind in (str, bool, int, float, Path) if kind.__name__ in words), str)
