"""From a body's `response_format` or `structured_outputs` to the form that the output must have."""

from typing import Any

from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.server.errors import ApiError
from forge.server.schema import OpenAiRequest, ResponseFormat, Sampling, StructuredOutputs


def structured_output(body: Sampling) -> StructuredOutput | None:
    """None where any text will do. Raises `ApiError` for a form that is incomplete, or for two."""
    response_format = body.response_format if isinstance(body, OpenAiRequest) else None
    forms = [
        (name, given)
        for name, given in (
            ("response_format", _of_response_format(response_format)),
            ("structured_outputs", _of_structured_outputs(body.structured_outputs)),
        )
        if given is not None
    ]
    if len(forms) > 1:
        raise ApiError("give response_format or structured_outputs, not both", param="structured_outputs")
    for name, given in forms:
        try:
            return StructuredOutput(**given)
        except UsageError as error:
            raise ApiError(str(error), param=name) from None
    return None


def param_of(body: Sampling) -> str:
    """The parameter that an error about the form is about."""
    return "structured_outputs" if body.structured_outputs is not None else "response_format"


def _of_response_format(given: ResponseFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"json": {"type": "object"}}
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise ApiError("response_format of type json_schema needs json_schema.schema", param="response_format")
    return {"json": given.json_schema.schema_}


def _of_structured_outputs(given: StructuredOutputs | None) -> dict[str, Any] | None:
    if given is None:
        return None
    form = {"json": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar}
    form = {name: value for name, value in form.items() if value is not None}
    if given.json_object:
        form.setdefault("json", {"type": "object"})
    return form
