"""A run on disk: JSON Lines that hold every `StepRecord` and every request's end, with no number rounded.

The first line says what ran and which version of the schema the rest follows. Each further line is one record,
`{"step": {…}}` or `{"end": {…}}`, in the order in which things happened. A line is written whole and at once, so a
process that is killed leaves a file that can be read up to the previous step.

A new field with a default, a renamed field or value that `FORMERLY` names, and a field that became a property need no
new version of the schema; any other change does.
"""

import json
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from forge import __version__
from forge.errors import ForgeError, file_error
from forge.trace.codec import codec_of
from forge.trace.records import EndRecord, StepRecord

SCHEMA_VERSION = 1
_VERSION = "forge_trace"
"""The field that every trace begins with."""
_RECORDS: dict[str, type] = {"step": StepRecord, "end": EndRecord}


class TraceError(ForgeError):
    """A file is no trace, or no trace that this version reads."""


@dataclass(frozen=True)
class TraceHeader:
    """The model and the options of a recorded run."""

    model: str
    kv: str
    device: str
    device_description: str
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True
    order: str = "fcfs"
    preempt: str = "lifo"
    preemption: str = "recompute"
    num_host_blocks: int = 0
    command: tuple[str, ...] = ()
    """The command line, without the program."""
    forge: str = __version__
    """The version of forge that wrote it."""


@dataclass(frozen=True)
class Trace:
    """A run as it was recorded."""

    header: TraceHeader
    steps: tuple[StepRecord, ...]
    ends: tuple[EndRecord, ...] = ()
    note: str | None = None
    """A remark about the file, such as that its last line is cut off."""


class TraceWriter:
    """Writes a trace. Used as a context manager, which closes the file."""

    def __init__(self, path: Path):
        """Open and truncate `path`. Raises `TraceError` if it cannot be written."""
        self._path = path
        self._begun = False
        try:
            self._file: TextIOWrapper = path.open("w", encoding="utf-8", newline="\n", buffering=1)
        except OSError as error:
            raise file_error(f"{path}: cannot write the trace", error) from None

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def begin(self, header: TraceHeader) -> None:
        """Write the first line. A second call writes nothing: the records after it belong to the same run."""
        if not self._begun:
            self._begun = True
            self._write({_VERSION: SCHEMA_VERSION} | codec_of(TraceHeader).encode(header) | {"forge": header.forge})

    def write(self, record: StepRecord | EndRecord) -> None:
        """Write a record as one line."""
        name, kind = next((name, kind) for name, kind in _RECORDS.items() if isinstance(record, kind))
        self._write({name: codec_of(kind).encode(record)})

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
        except OSError as error:
            raise file_error(f"{self._path}: cannot write the trace", error) from None


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises `TraceError`, with the number of the line, for a file that is no trace or is damaged, and
    `UsageError` for one that is not there.

    A last line that was cut off is left out, and the trace's `note` says so.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise file_error(f"{path}: cannot read the trace", error) from None
    cut = lines.pop()
    header = _header(path, lines[0] if lines else cut)
    records = [_record(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    steps = tuple([record for record in records if isinstance(record, StepRecord)])
    ends = tuple([record for record in records if isinstance(record, EndRecord)])
    note = f"the last line is cut off: {len(steps)} whole steps were read" if cut and lines else None
    return Trace(header, steps, ends, note)


def _header(path: Path, line: bytes) -> TraceHeader:
    try:
        fields = json.loads(line)
        version = fields.pop(_VERSION)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise TraceError(f"{path}: no forge trace: its first line does not say {_VERSION!r}") from None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise TraceError(f"{path}, line 1: {_VERSION} is {version!r} and should be a version of the schema")
    if version > SCHEMA_VERSION:
        raise TraceError(
            f"{path}: written by forge {fields.get('forge', '?')} in version {version} of the trace's schema, and this "
            f"forge ({__version__}) reads up to {SCHEMA_VERSION}: update forge"
        )
    try:
        header: TraceHeader = codec_of(TraceHeader).decode(fields, "")
    except ValueError as error:
        raise TraceError(f"{path}, line 1: {error}") from None
    return header


def _record(path: Path, number: int, line: bytes) -> StepRecord | EndRecord:
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict) or len(fields) != 1 or next(iter(fields)) not in _RECORDS:
            raise ValueError(f"a line holds one of {', '.join(_RECORDS)}")
        ((name, value),) = fields.items()
        record: StepRecord | EndRecord = codec_of(_RECORDS[name]).decode(value, "")
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line {number}: {str(error) or 'nested too deeply'}") from None
    return record
