"""Options: how one is declared, and which means nothing without which.

`option` is a dataclass field that says what the command line shows of it. An option stands once, as such a field: name,
type, default, help. `LLM`'s keywords, the server's settings and the options of the commands all come from it. What is
here is plain text; `forge.cli.arguments` makes the command line of it. A field without it is an argument in Python
alone.

`NEEDS` says which option means nothing without which: one table, which every entrance asks. `check_needs` refuses what
would be ignored. A command calls it with all of its options and those that were given; `EngineArgs` (so `LLM` and every
command that makes one) with its fields and those that are not at their default; `forge compare` calls `settle`, because
there an option needs a meaning on one of the two sides.

A row applies where the option and the one that it depends on can both be given, or the latter is fixed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

from forge.errors import UsageError


def option(
    default: Any,
    help: str,
    group: str = "",
    *,
    flags: str = "",
    shown: str = "",
    metavar: str | None = None,
    envvar: str | None = None,
) -> Any:
    """Declare a field with a default and a help text.

    group: the heading that it stands under in a command's help; without one it comes first. flags: how it is spelled,
    if not like its name. shown: what the help says of a default that is None. metavar: what the help calls its value.
    envvar: the variable that it comes from if it is not given. What it means nothing without is in `NEEDS`.
    """
    words = {"help": help, "group": group, "flags": flags, "shown": shown}
    return field(default=default, metadata={**words, "metavar": metavar, "envvar": envvar})


def flag_of(name: str) -> str:
    """Return how an option is spelled by default: `max_model_len` is `--max-model-len`."""
    return f"--{name.replace('_', '-')}"


def check_value(name: str, value: float, holds: bool, meant: str) -> None:
    """Raise `UsageError` unless an option's value `holds`. meant: the values that do, in words."""
    if not holds:
        raise UsageError(f"{flag_of(name)} must be {meant}, and not {value:g}")


Values = Mapping[str, Any]


class Need(NamedTuple):
    """A rule: `option` has a meaning if `holds` is true of the value of `on`."""

    option: str
    on: str
    """Another option, or a name of `_derived` or `_OF_COMPARE`."""
    holds: Callable[[Any], bool]
    advice: str
    """The option that must be given. Empty: the two exclude each other."""
    may_come_later: bool = False
    """In Python it may be given before it has a meaning: `LLM.speculate_with` changes the mode of a loaded model, and a
    hand-over waits in the host pool in every mode."""


def _one_of(*values: str) -> Callable[[Any], bool]:
    """Return a check that a value is one of these. A value that is not text is the caller's own object, which may use
    the option."""
    return lambda value: any(not isinstance(item, str) or item in values for item in _items(value))


def _none_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: any(item not in values for item in _items(value))


def _items(value: Any) -> list[Any]:
    """Return the values of an option, several if it may be repeated."""
    return [*value] if isinstance(value, list | tuple) else [value]


def _is_given(value: Any) -> bool:
    return value not in (None, (), [], "", False)


def _is_not_given(value: Any) -> bool:
    return not _is_given(value)


def _is_above_zero(value: Any) -> bool:
    return bool(value > 0)


_POOL, _BLOCKS, _PROPOSERS = "--kv basic, paged or prefix", "--kv paged or prefix", "--speculate draft or ngram"
_CACHED, _PAGED, _SPECULATING = _none_of("off"), _one_of("paged", "prefix"), _none_of("off")
_SAMPLING, _COMPARED = "--temperature above 0", "--engine MODEL or --peer URL"
_ONE_PROMPT = "temperature top_p top_k min_p repetition_penalty seed stop ignore_eos drafts num_speculative_tokens"
"""Options of `forge compare` that many requests, which are greedy, ignore."""
_MADE_UP = (
    "requests arrival prompt_tokens max_tokens dataset input_tokens output_tokens num_prompts prefix_reuse request_rate"
)
"""Options of requests that are made up, and not replayed from a record."""
_LENGTHS = "prompt_tokens output_tokens arrival workload"
"""Options of `forge compare` about requests whose lengths are not given."""


def _needs(options: str, on: str, holds: Callable[[Any], bool], advice: str = "", later: bool = False) -> list[Need]:
    """Return the rules of options that mean nothing without the same; `options` are words."""
    return [Need(option, on, holds, advice, later) for option in options.split()]


NEEDS: tuple[Need, ...] = (
    *_needs("block_size num_blocks kv_memory gpu_memory_utilization", "kv", _CACHED, _POOL),
    *_needs("gpu_memory_utilization", "device", _one_of("cuda"), "--device cuda (elsewhere --kv-memory)"),
    *_needs("invariant", "device", _one_of("cuda"), "--device cuda (elsewhere bits never depend on the batch)"),
    *_needs("kernels", "device", _one_of("cuda"), "--device cuda (the others have kernels of their own)"),
    *_needs("quantize", "device", _none_of("reference"), "--device cpu or cuda (the reference computes in float32)"),
    *_needs("threads", "device", _none_of("reference"), "--device cpu (the reference has no threads)"),
    *_needs("draft", "speculate", _one_of("draft"), "--speculate draft"),
    *_needs("draft_device", "speculate", _one_of("draft"), "--speculate draft", later=True),
    *_needs("k speculate_fixed", "speculate", _SPECULATING, _PROPOSERS, later=True),
    *_needs("acceptance", "speculate", _one_of("draft", "ngram"), _PROPOSERS, later=True),
    *_needs("drafts", "speculate", _one_of("draft"), "--speculate draft"),
    *_needs("num_speculative_tokens tenants", "speculate", _SPECULATING, _PROPOSERS),
    *_needs("preempt", "kv", _PAGED, _BLOCKS),
    *_needs("preempt", "order", _none_of("priority"), "another --order (priority chooses the victim itself)"),
    *_needs("preemption", "kv", _PAGED, _BLOCKS),
    *_needs("evict", "kv", _one_of("prefix"), "--kv prefix"),
    *_needs("num_host_blocks", "preemption", _one_of("swap"), "--preemption swap", later=True),
    *_needs("prefix_planning", "kv", _one_of("prefix"), "--kv prefix"),
    *_needs("top_p top_k min_p seed", "temperature", _is_above_zero, _SAMPLING),
    *_needs("show", "kv", _CACHED, _POOL),
    *_needs("pace", "show", _is_given, "--show blocks"),
    *_needs("svg step view", "seq", _is_not_given),
    *_needs("svg step", "view", _is_not_given),
    *_needs(_MADE_UP, "workload", _is_not_given),
    *_needs("workload", "compared", _is_not_given),
    *_needs("instruction", "by", _one_of("answer"), "--by answer"),
    *_needs("question", "raw", _is_not_given),
    *_needs("router", "engines", _is_given, "--replicas, --max-replicas or --decode-replicas"),
    *_needs("target_requests upscale_delay downscale_delay", "max_replicas", _is_given, "--max-replicas"),
    *_needs("num_blocks threads", "engine", _is_given, "--engine MODEL"),
    *_needs("turns", "compared", _is_given, _COMPARED),
    *_needs("peer_model", "peer", _is_given, "--peer URL"),
    *_needs("return_draft_at", "revoke_draft_at", _is_given, "--revoke-draft-at"),
    *_needs(_LENGTHS, "planned", _is_not_given),
    *_needs(_LENGTHS, "prompted", _is_not_given),
    *_needs("requests", "prompts", _is_not_given),
    *_needs("prompts", "many", _is_not_given),
    *_needs("execution_class", "planned", bool, "it as --class generation vs prefill-only"),
    *_needs(_ONE_PROMPT, "many", _is_not_given),
)
"""All rules."""
_OF_COMPARE = {
    "many": "for many requests at once, which are made up and greedy",
    "planned": "for judge requests, whose lengths are their own",
    "prompted": "where the prompt is given",
}
"""Further names that `forge compare` adds: what it runs on each side."""


def check_needs(
    values: Values, stated: Collection[str], spelled: Mapping[str, str] | None = None, in_python: bool = False
) -> None:
    """Refuse an option that means nothing beside the others.

    values: of every option, by name, and of what is fixed. stated: those that the user set. spelled: how an option is
    written, if not like its name. in_python: a loaded model may be asked for more later. Raises `UsageError`.
    """
    for need in _failing(values, stated):
        if not (in_python and need.may_come_later):
            raise _error(need, values, spelled or {})


def settle(
    sides: Sequence[MutableMapping[str, Any]], stated: Collection[str], spelled: Mapping[str, str] | None = None
) -> None:
    """Take an option from the side of a comparison where it means nothing: its value becomes None.

    Raises `UsageError` for one that means nothing on both sides.
    """
    failing = [list(_failing(side, stated)) for side in sides]
    meaningless = [{need.option for need in needs} for needs in failing]
    for need in failing[0]:
        if all(need.option in options for options in meaningless):
            raise _error(need, sides[0], spelled or {})
    for side, options in zip(sides, meaningless, strict=True):
        side.update(dict.fromkeys(options))


def _failing(values: Values, stated: Collection[str]) -> Iterator[Need]:
    known = {**values, **_derived(values)}
    for need in NEEDS:
        if need.option in stated and need.option in values and need.on in known and not need.holds(known[need.on]):
            yield need


def _derived(values: Values) -> dict[str, Any]:
    """Return what a rule may depend on beside options: the mode that follows from others, and several options
    together."""
    derived: dict[str, Any] = {}
    if "speculate" in values:
        derived["speculate"] = values["speculate"] or "off"
    if "kv" in values:
        kv = values["kv"]
        speculates = derived.get("speculate", "off") != "off"
        derived["kv"] = kv.strip() if isinstance(kv, str) else kv or ("paged" if speculates else "off")
    if "temperature" in values:
        derived["temperature"] = values["temperature"] or 0
    if "decode_replicas" in values:
        engines = ("replicas", "max_replicas", "decode_replicas", "attach")
        derived["engines"] = next((values[name] for name in engines if values.get(name)), None)
    if "peer" in values:
        derived["compared"] = values["peer"] or values.get("engine")
    return derived


def _error(need: Need, values: Values, spelled: Mapping[str, str]) -> UsageError:
    flag, on = (spelled.get(name, flag_of(name)) for name in (need.option, need.on))
    if need.on in _OF_COMPARE and not need.advice:
        return UsageError(f"{flag} means nothing {_OF_COMPARE[need.on]}: leave it out")
    if not need.advice:
        return UsageError(f"{flag} means nothing with {on}: give one of the two")
    value = {**values, **_derived(values)}[need.on]
    if (not _is_given(value) and value != 0) or isinstance(value, bool):
        return UsageError(f"{flag} means nothing without {need.advice}: give that too, or leave {flag} out")
    shown = ", ".join(map(str, _items(value)))
    return UsageError(f"{flag} means nothing with {on} {shown}: give {need.advice}, or leave {flag} out")
