"""From a body's `response_format`, `structured_outputs` or `tools` to the form that the output must have."""

from collections.abc import Iterator
from typing import Any

from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.server.errors import ApiError
from forge.server.schema import OpenAiRequest, ResponseFormat, Sampling, StructuredOutputs
from forge.server.tools import tool_use


def structured_output(body: Sampling) -> StructuredOutput | None:
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


def parts_of(body: Sampling) -> Iterator[tuple[str, str, StructuredOutput]]:
    """Return the parts of a grammar that can be wrong by themselves: what a message begins with, the parameter, the
    form."""
    tools = tool_use(body)
    if tools is not None:
        for name, schema in tools.schemas():
            yield f"{name}: ", "tools", schema
        name, form = _form(body)
        if form is not None:
            yield "", name, StructuredOutput(**form)


def param_of(body: Sampling) -> str:
    """Return the parameter that an error about the whole form is about."""
    if tool_use(body) is not None:
        return "tools"
    return _form(body)[0]


def _form(body: Sampling) -> tuple[str, dict[str, Any] | None]:
    """Return the parameter that says what an answer in text must be, and what it says."""
    response_format = body.response_format if isinstance(body, OpenAiRequest) else None
    forms = [
        (name, form)
        for name, form in (
            ("response_format", _of_response_format(response_format)),
            ("structured_outputs", _of_structured_outputs(body.structured_outputs)),
            ("json_schema", None if body.json_schema is None else {"json": body.json_schema}),
            ("grammar", {"grammar": body.grammar} if body.grammar else None),
        )
        if form is not None
    ]
    if len(forms) > 1:
        raise ApiError(f"give {forms[0][0]} or {forms[1][0]}, not both", param=forms[1][0])
    return forms[0] if forms else ("response_format", None)


def _of_response_format(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    schema = response_format.schema_ if response_format.json_schema is None else response_format.json_schema.schema_
    if schema is None and response_format.type == "json_schema":
        raise ApiError("response_format of type json_schema needs json_schema.schema", param="response_format")
    return {"json": {"type": "object"} if schema is None else schema}


def _of_structured_outputs(outputs: StructuredOutputs | None) -> dict[str, Any] | None:
    if outputs is None:
        return None
    form = {"json": outputs.json_, "regex": outputs.regex, "choice": outputs.choice, "grammar": outputs.grammar}
    form = {name: value for name, value in form.items() if value is not None}
    if outputs.json_object:
        form.setdefault("json", {"type": "object"})
    return form
