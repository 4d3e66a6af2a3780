"""Records as plain JSON values and back, derived from the records' own types: reading gives what was written, equal.

A dataclass or NamedTuple becomes an object by field name, without the fields that have their default value. A tuple
becomes a list. Where a field may hold one of several records the object says which in `"is"`. Numbers that JSON does
not have (NaN, infinities) become their names as text. A type needs nothing but its annotations to be recorded.

Without msgspec or pydantic: msgspec makes no decoder for a field of several dataclasses, pydantic reads a `NoBudget`
back as `MaxNumSeqs`; with both a NamedTuple becomes a list, a NaN null, and an unknown field goes unnoticed. Records
would have to derive from their classes, and importing either takes 100 ms.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from forge.trace.records import FORMERLY

TAG = "is"
_PLURAL = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class Codec(NamedTuple):
    """Writes and reads the values of one type."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any, str], Any]
    """Called with (JSON value, its place). Raises `ValueError`, naming the place, for a value of another kind."""


@cache
def codec_of(annotation: Any) -> Codec:
    """Return the codec of a record class, a tuple, a union of records, a literal or a plain type."""
    origin = get_origin(annotation)
    if annotation in _PLURAL:
        return _plain(annotation)
    if origin is Literal:
        return _literal(get_args(annotation))
    if origin is tuple:
        return _tuple(get_args(annotation))
    if origin in (Union, UnionType):
        return _union(get_args(annotation))
    if _is_record(annotation):
        return _record(annotation)
    raise TypeError(f"{annotation} cannot be recorded")


def _is_record(annotation: Any) -> bool:
    return is_dataclass(annotation) or (isinstance(annotation, type) and hasattr(annotation, "_fields"))


def _plain(kind: type) -> Codec:
    def encode(value: Any) -> Any:
        return repr(value) if kind is float and not math.isfinite(value) else value

    def decode(value: Any, where: str) -> Any:
        if kind is float and value in ("nan", "inf", "-inf"):
            return float(value)
        if not _is_plain(value, kind):
            raise ValueError(f"{where} is {value!r} and should be {_PLURAL[kind]}")
        return value

    return Codec(encode, decode)


def _is_plain(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _literal(allowed: tuple[Any, ...]) -> Codec:
    def decode(value: Any, where: str) -> Any:
        if value not in allowed:
            if FORMERLY.get(value) in allowed:
                return FORMERLY[value]
            raise ValueError(f"{where} is {value!r} and should be one of {', '.join(map(str, allowed))}")
        return value

    return Codec(lambda value: value, decode)


def _tuple(members: tuple[Any, ...]) -> Codec:
    if members[-1] is Ellipsis:
        member = codec_of(members[0])
        return Codec(
            lambda value: [member.encode(item) for item in value],
            lambda value, where: tuple(
                member.decode(item, f"{where}[{index}]") for index, item in enumerate(_require(value, list, where))
            ),
        )
    codecs = [codec_of(member) for member in members]

    def decode(value: Any, where: str) -> tuple[Any, ...]:
        if len(_require(value, list, where)) != len(codecs):
            raise ValueError(f"{where} has {len(value)} values and should have {len(codecs)}")
        return tuple(codec.decode(item, where) for codec, item in zip(codecs, value, strict=True))

    return Codec(lambda value: [codec.encode(item) for codec, item in zip(codecs, value, strict=True)], decode)


def _union(members: tuple[Any, ...]) -> Codec:
    kinds = [member for member in members if member is not NoneType]
    present = _tagged(kinds) if len(kinds) > 1 and _is_record(kinds[0]) else _any_of(kinds)

    def decode(value: Any, where: str) -> Any:
        return None if value is None and NoneType in members else present.decode(value, where)

    return Codec(lambda value: None if value is None else present.encode(value), decode)


def _any_of(kinds: Sequence[Any]) -> Codec:
    """Return the codec of a single type, or of plain types, such as text and whole numbers, that JSON tells apart."""
    codecs = [codec_of(kind) for kind in kinds]

    def decode(value: Any, where: str) -> Any:
        for codec in codecs[:-1]:
            with suppress(ValueError):
                return codec.decode(value, where)
        return codecs[-1].decode(value, where)

    return Codec(codecs[0].encode, decode)


def _tagged(records: Sequence[type]) -> Codec:
    by_name = {record.__name__: codec_of(record) for record in records}

    def encode(value: Any) -> Any:
        name = type(value).__name__
        return {TAG: name} | by_name[name].encode(value)

    def decode(value: Any, where: str) -> Any:
        name = _require(value, dict, where).get(TAG)
        if name not in by_name:
            raise ValueError(f"{where} is {name!r} and should be one of {', '.join(by_name)}")
        return by_name[name].decode({key: item for key, item in value.items() if key != TAG}, where)

    return Codec(encode, decode)


def _record(kind: type) -> Codec:
    hints = get_type_hints(kind)
    defaults = _defaults(kind)
    codecs = {name: codec_of(hints[name]) for name in defaults}
    renamed = {former: name for former, name in FORMERLY.items() if name in codecs}
    derived = {name for name, member in vars(kind).items() if isinstance(member, property)}
    outdated = renamed.keys() | derived

    def encode(value: Any) -> dict[str, Any]:
        values = {}
        for name, codec in codecs.items():
            item, default = getattr(value, name), defaults[name]
            if default is MISSING or type(item) is not type(default) or item != default:
                values[name] = codec.encode(item)
        return values

    def decode(value: Any, where: str) -> Any:
        _require(value, dict, where)
        prefix = f"{where}." if where else ""
        if not outdated.isdisjoint(value):
            value = {renamed.get(name, name): item for name, item in value.items() if name not in derived}
        for name in value:
            if name not in codecs:
                raise ValueError(f"{prefix}{name} is no field of {kind.__name__}")
        for name, default in defaults.items():
            if default is MISSING and name not in value:
                raise ValueError(f"{prefix}{name} is missing")
        return kind(**{name: codecs[name].decode(item, prefix + name) for name, item in value.items()})

    return Codec(encode, decode)


def _defaults(kind: Any) -> dict[str, Any]:
    """Return each field of a record with its default value, or MISSING."""
    if is_dataclass(kind):
        return {field.name: field.default for field in fields(kind)}
    return {name: kind._field_defaults.get(name, MISSING) for name in kind._fields}


def _require(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(
            f"{where or 'the line'} is {value!r} and should be {'a list' if kind is list else 'an object'}"
        )
    return value
