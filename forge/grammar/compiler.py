"""From a JSON Schema, a regular expression, choices or a Lark grammar to a compiled grammar, by `llguidance`.

Compiling is bounded by the text's size and by the library's own limits, which count work and memory instead of time.
They do not count all of it: a client's grammar is compiled in `sandbox` first, where time and memory end, and here only
once it is known to be affordable. What was compiled last is kept by its content.

JSON is written as Python's `json.dumps` writes it, with one space after a colon and a comma: the form that models have
read most of, and one that leaves the most text with no choice (`Matcher.forced`).
"""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from forge.engine.structured_output import Grammar, MatcherError, StructuredOutput
from forge.errors import UsageError
from forge.grammar.matcher import CompiledGrammar
from forge.grammar.thinking import ThinkingGrammar
from forge.grammar.vocabulary import Encode, Vocabulary, ll_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from forge.tokenizer import Tokenizer

MAX_CHARS = 64 << 10
"""Characters of a grammar's text, at most."""
MAX_CACHED = 64
"""Compiled grammars that are kept: each takes memory for the states that it has visited."""
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "max_grammar_size": 50_000,
    "max_lexer_states": 50_000,
}
"""Units of work to build the lexer and to compute a mask (20 ms and 4 ms of an ordinary grammar), symbols, and states:
100 MB if all were visited. The library's own limits are up to ten times as high."""
_TRIED = 2
"""Tokens of a walk through every new grammar. One whose masks take too much work is refused here, and not while it
holds up a step."""
_JSON_FORM: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_LARK = re.compile(r"^[ \t]*(%llguidance\b|start\s*:)", re.MULTILINE)
"""A pattern that GBNF never matches. The library's own expression takes time that grows with the square of the empty
lines."""
_MAX_MESSAGE = 300
BEGIN_CALL, END_CALL, _NEWLINE = "<tool_call>", "</tool_call>", "\n"
TOO_DEEP = "it is nested too deeply: make it simpler"


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in this process and without a limit of time. May be called from several
    threads, and is cheap to make: `llguidance` and the vocabulary are loaded with the first grammar."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._encode = Encode(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self._library: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        """The last used is the last."""
        self._lock = Lock()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._tokenizer, self._vocab_size)

    def load(self) -> "LLTokenizer":
        """Load the library and the vocabulary, if that has not happened."""
        with self._lock:
            if self._library is None:
                self._library = ll_tokenizer(self.vocabulary, self._encode)
            return self._library

    def __call__(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar. Raises `UsageError` for one that is wrong, too large, or needs what is not supported,
        naming it."""
        if structured.thinking == "none":
            return self._cached(structured)
        answer = self._cached(replace(structured, thinking="none"))
        return ThinkingGrammar(answer, self._tokenizer, self._vocab_size, structured.thinking == "open")

    def _cached(self, structured: StructuredOutput) -> CompiledGrammar:
        with self._lock:
            compiled = self._compiled.get(structured)
        if compiled is None or compiled.is_spent:
            check_size(structured)
            compiled = compile_grammar(structured, self.load(), self.vocabulary, self._encode)  # holds no other up
        with self._lock:
            self._compiled[structured] = compiled
            self._compiled.move_to_end(structured)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled


def check_size(structured: StructuredOutput) -> None:
    """Raise `UsageError` for a grammar whose text is too long."""
    length = len(_source(structured))
    if length > MAX_CHARS:
        raise UsageError(f"a grammar has at most {MAX_CHARS} characters, and this one has {length}")


def compile_grammar(
    structured: StructuredOutput, library: "LLTokenizer", vocabulary: Vocabulary, encode: Encode | None = None
) -> CompiledGrammar:
    """Compile without thinking. encode: what the library encodes texts by, if not by itself. Raises `UsageError`."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = _library_grammar(structured, _source(structured))
        matcher = LLMatcher(library, grammar, log_level=0, limits=LLParserLimits(**_LIMITS, verbose_errors=False))
    except ValueError as error:
        raise refusal(structured, str(error)) from None
    except RecursionError:
        raise refusal(structured, TOO_DEEP) from None
    if matcher.is_error():
        raise refusal(structured, matcher.get_error())
    compiled = CompiledGrammar(matcher, vocabulary.eos_token_ids, len(vocabulary.tokens), encode)
    try:
        _try(compiled)
    except MatcherError as error:
        raise refusal(structured, str(error)) from None
    return compiled


def without_gbnf(structured: StructuredOutput) -> StructuredOutput:
    """Translate GBNF, the notation of llama.cpp, to Lark. This takes Python up to half a second. Raises
    `UsageError`."""
    if structured.grammar is None:
        return structured
    try:
        return replace(structured, grammar=_lark(structured.grammar))
    except ValueError as error:
        raise refusal(structured, str(error)) from None


def _try(compiled: CompiledGrammar) -> None:
    """Walk a few tokens into the grammar. Raises `MatcherError` if it cannot be used."""
    matcher = compiled.new_matcher()
    output: list[int] = []
    for _ in range(_TRIED + 1):
        possible = np.flatnonzero(matcher.mask(output))
        allowed = [token_id for token_id in possible if token_id not in compiled.eos_token_ids]
        if not allowed:
            break
        output.append(int(allowed[len(allowed) // 2]))


def _source(structured: StructuredOutput) -> str:
    """Return the text that the limit is about."""
    if structured.choice is not None:
        return "".join(structured.choice)
    return str(getattr(structured, structured.kind))


def _library_grammar(structured: StructuredOutput, source: str) -> str:
    from llguidance import LLMatcher

    if structured.kind == "json":
        _check_exclusive_bounds(json.loads(source), "allOf" in source)
        return LLMatcher.grammar_from_json_schema(source, overrides=_JSON_FORM)
    if structured.kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if structured.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_lark_text, structured.choice)))
    return LLMatcher.grammar_from_lark(_lark(source))


def _lark(grammar: str) -> str:
    """Return a grammar in Lark's notation, whichever of the two it has. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except Exception as error:  # its parser has errors of several kinds
        raise ValueError(str(error)) from None


def _check_exclusive_bounds(schema: Any, is_joined: bool) -> None:
    """Refuse what the library gets wrong: an exclusive bound of a range below 1 wide (5 < x <= 5.5 lets 5 pass).

    is_joined: bounds may come from several places, so none is known to be alone. Raises ValueError.
    """
    if isinstance(schema, list):
        for member in schema:
            _check_exclusive_bounds(member, is_joined)
    if not isinstance(schema, dict):
        return
    is_exclusive = True in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))  # as draft 4 writes it
    if (is_exclusive or _numbers(schema, "exclusiveMinimum", "exclusiveMaximum")) and schema.get("type") != "integer":
        low, high = _numbers(schema, "minimum", "exclusiveMinimum"), _numbers(schema, "maximum", "exclusiveMaximum")
        if is_joined or (low and high and min(high) - max(low) < 1):
            problem = "an exclusive bound of a range less than 1 wide is not supported"
            raise ValueError(f"{problem}; take minimum and maximum")
    for member in schema.values():
        _check_exclusive_bounds(member, is_joined)


def _numbers(schema: Mapping[str, Any], *names: str) -> list[float]:
    values = [schema.get(name) for name in names]
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def refusal(structured: StructuredOutput, message: str) -> UsageError:
    """Say why a grammar is refused, in one line."""
    line = " ".join(message.split())
    if "Unimplemented keys" in line:
        keys = line.partition("[")[2].partition("]")[0].replace('"', "")
        line = f"{keys}: not supported; leave it out, or say it another way"
    elif "oneOf constraints are not supported" in line:
        line = "oneOf whose cases may hold together is not supported; take anyOf"
    kinds = {"json": "JSON schema", "regex": "regular expression", "choice": "choice", "grammar": "grammar"}
    return UsageError(f"the {kinds[structured.kind]} is refused: {line[:_MAX_MESSAGE]}")


def tool_call_grammar(
    functions: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    required: bool,
    parallel: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Return a Lark grammar of tool calls as Qwen3 writes them (Hermes's format): JSON between `<tool_call>` and
    `</tool_call>`.

    Where a call must come, the output is one or more calls. Where one may come, the output is text in which
    `<tool_call>` begins a call, so that the text stays free and a call once begun is whole; or it is JSON by a schema
    instead of text. functions: the name of each, and the schema of its arguments. required: at least one call, and
    nothing but calls. parallel: more than one may come. answer: the schema of what comes where no call does; None for
    any text."""
    rules = [f"call_{index}: {_lark_call(*function)}" for index, function in enumerate(functions)]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    calls = f"{_lark_text(BEGIN_CALL)} call" + (f" ({_lark_text(_NEWLINE + BEGIN_CALL)} call)*" if parallel else "")
    if required:
        rules.append(f"start: {calls}")
    elif answer is not None:
        rules += [f"start: answer | {calls}", f"answer: {_lark_json(answer)}"]
    else:
        rules += [f"start: {'(begin call)* TEXT' if parallel else 'begin call | TEXT'}"]
        rules += [f"begin[lazy]: TEXT {_lark_text(BEGIN_CALL)}", r"TEXT: /(.|\n)*/"]
    return "%llguidance {}\n" + "\n".join(rules)


def _lark_call(name: str, schema: Mapping[str, Any]) -> str:
    """Return the rules of what follows `<tool_call>`."""
    head = f'\n{{"name": "{name}", "arguments": '
    return f"{_lark_text(head)} {_lark_json(schema)} {_lark_text('}' + _NEWLINE + END_CALL)}"


def _lark_json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_FORM}, ensure_ascii=False)
