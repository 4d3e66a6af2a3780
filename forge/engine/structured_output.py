"""Structured output: a grammar says which tokens may come next.

A request names a grammar (`StructuredOutput`), which is compiled once (`Grammar`). Each sequence has a `Matcher` for
it, and the sampler gives every token that the matcher refuses the logit -infinity before anything is chosen.

A matcher is a function of the output tokens alone. Every call brings them, and an implementation trusts its own state
only as far as that agrees with them. So a preemption, a fork, an interrupted step or rejected draft tokens need no
message: the next call has other tokens. `forge.grammar` implements all of this; the engine imports nothing of it.
"""

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from forge.errors import ForgeError, UsageError

if TYPE_CHECKING:
    import numpy as np  # the command line describes a `StructuredOutput` without it


GrammarKind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class StructuredOutput:
    """The form that an output must have: exactly one of these fields. Raises `UsageError` otherwise."""

    json: str | Mapping[str, Any] | None = None
    """A JSON Schema; kept as text. The empty schema is any JSON value."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Items[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A Lark grammar, whose rule `start` is the whole output."""
    thinking: Literal["none", "may_open", "open"] = "none"
    """Free text up to `</think>` comes first: where the output begins with `<think>`, or in any case, because the
    prompt ends inside the thinking."""
    is_slow: bool = field(default=False, compare=False)
    """Compiling it is known to take long: a server does it beside the others."""

    def __post_init__(self) -> None:
        forms = self._forms()
        if len(forms) != 1:
            named = ", ".join(forms) or "none"
            raise UsageError(f"structured output takes exactly one of json, regex, choice and grammar, got {named}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if (choices := self.choice) is not None:
            if isinstance(choices, str) or not choices or not all(isinstance(text, str) and text for text in choices):
                raise UsageError("structured output: choice must be one or more texts, none of them empty")
            object.__setattr__(self, "choice", tuple(choices))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise UsageError(f"structured output: {name} must be text")

    def _forms(self) -> list[GrammarKind]:
        return [kind for kind in get_args(GrammarKind) if getattr(self, kind) is not None]

    @property
    def kind(self) -> GrammarKind:
        return self._forms()[0]

    def form(self) -> dict[str, Any]:
        """Return the form as plain data; `StructuredOutput(**form)` is the same without thinking."""
        return {self.kind: getattr(self, self.kind)}


class MatcherError(ForgeError):
    """A matcher cannot go on: the grammar needs more work for one token than is allowed."""


class Matcher(Protocol):
    """A grammar's state in one sequence. `output` are always the sequence's output tokens so far."""

    def mask(self, output: Items[int]) -> "np.ndarray":
        """Return True for every token that may come next: bool `[vocab]`, read-only, never all False. Where the output
        may end, that includes the tokens that end it. Raises `MatcherError`."""

    def num_allowed(self, output: Items[int], token_ids: Items[int]) -> int:
        """Return how many of `token_ids`, from the first on, may follow. Raises nothing."""

    def forced(self, output: Items[int]) -> tuple[int, ...]:
        """Return the tokens of the text that must come next, as the tokenizer writes it; none if there is a choice.
        Raises nothing."""


class Grammar(Protocol):
    """A compiled grammar, which many sequences may share."""

    def new_matcher(self) -> Matcher: ...


CompileGrammar = Callable[[StructuredOutput], Grammar]
"""Raises `UsageError` for a grammar that is wrong, that is too large, or that needs what is not supported."""


def _schema_text(schema: object) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply: make it simpler") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"the JSON schema is no JSON: {error}") from None
    if not isinstance(parsed, Mapping):
        raise UsageError("a JSON schema is an object, such as {} for any JSON value")
    return text
