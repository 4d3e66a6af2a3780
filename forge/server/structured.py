"""The form that an answer must have: from a body's `response_format`, `structured_outputs` or `tools` to a grammar.

A tool call is text, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, which the model's chat template has asked
for. With `tool_choice` `required` or a name the answer is nothing but calls, by their schemas. With `auto` it is free,
and what looks like a call but is none stays text; a tool with `strict`, and `parallel_tool_calls: false`, make a
grammar that leaves the text free and keeps a call once begun to its form.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.grammar.compiler import tool_call_grammar
from forge.server import schema
from forge.server.errors import ApiError
from forge.server.splitting import parsed

_ANYTHING = {"type": "object"}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, and how they may be used."""

    functions: tuple[schema.Function, ...]
    """The functions that may be called."""
    is_required: bool
    is_parallel: bool
    """Whether more than one call may come."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def constrains(self) -> bool:
        """Return whether the calls need a grammar."""
        return self.is_required or not self.is_parallel or any(function.strict for function in self.functions)

    def schema_of(self, function: schema.Function) -> Mapping[str, Any]:
        """Return the schema that a function's arguments must keep to: any object, unless its own is enforced."""
        if not (self.is_required or function.strict):
            return _ANYTHING
        return arguments_schema(function)

    def structured(self, answer: Mapping[str, Any] | None) -> StructuredOutput:
        """Return the form of the answer. answer: the schema of an answer without calls, if it has one. Raises
        `ApiError`."""
        callables = [(function.name, self.schema_of(function)) for function in self.functions]
        how = {"required": self.is_required, "parallel": self.is_parallel}
        try:
            return StructuredOutput(grammar=tool_call_grammar(callables, **how, answer=answer))
        except (UsageError, ValueError, RecursionError) as error:
            raise ApiError(str(error), param="tools") from None

    def schemas(self) -> Iterator[tuple[str, StructuredOutput]]:
        """Return for every function whose schema counts its name and the schema alone, so that a wrong one can be
        named."""
        for function in self.functions:
            if function.parameters is not None and (self.is_required or function.strict):
                yield function.name, StructuredOutput(json=arguments_schema(function))


def tool_use(body: Any) -> ToolUse | None:
    """Return the tools of a body; None if no tool may be called. Raises `ApiError` for tools that are wrong or a choice
    that is not theirs."""
    if not isinstance(body, schema.ChatRequest):
        return None
    choice = body.tool_choice
    if not body.tools:
        if choice == "required" or isinstance(choice, schema.NamedTool):
            raise ApiError("tool_choice asks for a call and there are no tools: give tools", param="tool_choice")
        return None
    functions = [tool.function for tool in body.tools]
    _check(functions)
    if choice == "none":
        return None
    if isinstance(choice, schema.NamedTool):
        name = choice.function.name
        functions = [function for function in functions if function.name == name]
        if not functions:
            raise ApiError(f"tool_choice names {name[:64]!r}, which is not in tools", param="tool_choice")
        return ToolUse(tuple(functions), True, False)
    return ToolUse(tuple(functions), choice == "required", body.parallel_tool_calls is not False)


def arguments_schema(function: schema.Function) -> Mapping[str, Any]:
    """Return the schema of a function's arguments: always an object."""
    if function.parameters is None:
        return _NOTHING
    kind = function.parameters.get("type", "object")
    if kind != "object":
        raise ApiError(f"tools: the parameters of {function.name} must be of type object", param="tools")
    return {"type": "object", **function.parameters}


def shown_tools(body: schema.Conversation) -> list[dict[str, Any]] | None:
    """Return the tools as the chat template lists them."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in body.tools
    ]


def shown_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier answer as templates take it: its arguments an object, if they are one."""
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        arguments = parsed(function["arguments"])
        function["arguments"] = arguments if isinstance(arguments, dict) else function["arguments"]
    return {**call, "function": function}


def _check(functions: list[schema.Function]) -> None:
    names: set[str] = set()
    for function in functions:
        if function.name in names:
            raise ApiError(f"tools: {function.name} is there twice", param="tools")
        names.add(function.name)
        arguments_schema(function)


def structured_output(body: schema.Sampling) -> StructuredOutput | None:
    """Return the form that a body requests; None if any text will do. Raises `ApiError` for a form that is incomplete,
    or for two."""
    name, form = _form(body)
    tools = tool_use(body)
    if tools is not None:
        if name in ("structured_outputs", "grammar"):
            raise ApiError(f"give tools or {name}, not both", param=name)
        answer = None if form is None else form["json"]
        return tools.structured(answer) if answer is not None or tools.constrains() else None
    if form is None:
        return None
    try:
        return StructuredOutput(**form)
    except UsageError as error:
        raise ApiError(str(error), param=name) from None


def parts_of(body: schema.Sampling, whole: StructuredOutput) -> Iterator[tuple[str, str, StructuredOutput]]:
    """Return the parts of a grammar that can be wrong by themselves, and then the whole: what a message begins with,
    the parameter, the form."""
    tools, (param, form) = tool_use(body), _form(body)
    if tools is not None:
        for name, arguments in tools.schemas():
            yield f"{name}: ", "tools", arguments
        if form is not None:
            yield "", param, StructuredOutput(**form)
        param = "tools"
    yield "", param, whole


def _form(body: schema.Sampling) -> tuple[str, dict[str, Any] | None]:
    """Return the parameter that says what an answer in text must be, and what it says."""
    response_format = body.response_format if isinstance(body, schema.OpenAiRequest) else None
    forms = {
        "response_format": _of_response_format(response_format),
        "structured_outputs": _of_structured_outputs(body.structured_outputs),
        "json_schema": None if body.json_schema is None else {"json": body.json_schema},
        "grammar": {"grammar": body.grammar} if body.grammar else None,
    }
    names = [name for name, form in forms.items() if form is not None]
    if len(names) > 1:
        raise ApiError(f"give {names[0]} or {names[1]}, not both", param=names[1])
    name = names[0] if names else "response_format"
    return name, forms[name]


def _of_response_format(response_format: schema.ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    outer, inner = response_format.schema_, response_format.json_schema
    json_schema = outer if inner is None else inner.schema_
    if json_schema is None and response_format.type == "json_schema":
        raise ApiError("response_format of type json_schema needs json_schema.schema", param="response_format")
    return {"json": _ANYTHING if json_schema is None else json_schema}


def _of_structured_outputs(outputs: schema.StructuredOutputs | None) -> dict[str, Any] | None:
    if outputs is None:
        return None
    form = {"json": outputs.json_, "regex": outputs.regex, "choice": outputs.choice, "grammar": outputs.grammar}
    form = {name: value for name, value in form.items() if value is not None}
    if outputs.json_object:
        form.setdefault("json", {"type": "object"})
    return form
