"""What a chapter knows without a run: the options that its reader gave, the shape of its model (`{{model.num_layers}}`
in a question), and the processor time that other programs took while an experiment ran (`machine.busy`).

The options are put into the command lines of the chapter's experiments:

    forge naive "The fox" --model mine.gguf      the chapter, with this prompt and model in every run that takes them

Linux counts the time of all programs in `/proc/stat`; what this process and its children took is subtracted. Where
there is no such file the load average of the minute before counts.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.cache.kv_storage import DEFAULT_KV_DTYPES, KV_ITEM_BYTES, vector_bytes
from forge.model.catalog import DEFAULT_MODEL, is_hash_model, model_name, resolve_model
from forge.views.json_output import picked

_VERSUS = "vs"
BUSY_SHARE = 0.25
"""Other programs' share of all processors from which on a run counts as disturbed."""
SHORTEST_SECONDS = 0.2
"""A shorter run is not judged: the system counts hundredths of a second."""


@dataclass(frozen=True)
class Syntax:
    """The parameters that a command takes."""

    positionals: tuple[str, ...]
    """The names of its arguments, in order."""
    options: Mapping[str, str]
    """Every spelling of every option that takes a value → its parameter's name."""


@dataclass(frozen=True)
class Given:
    """The options that a reader gave, by parameter name, spelled as on a command line; a tuple for an option given
    several times."""

    values: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)

    def applied(self, args: Sequence[str], syntax: Syntax) -> list[str]:
        """Return a command's `args` with the reader's options in place of its own.

        An option of which the line compares two values stays as it is: that is what the line is about.
        """
        positionals: list[str] = []
        kept: list[str] = []
        varied: set[str] = set()
        index = 0
        while index < len(args):
            arg = args[index]
            spelling, joined, _ = arg.partition("=")
            name = syntax.options.get(spelling)
            length = 1 if name is None or joined else 2
            if name is not None and args[index + length : index + length + 1] == [_VERSUS]:
                length += 2
                varied.add(name)
            if name is None and not arg.startswith("--"):
                positionals.append(arg)
            elif name is None or name in varied or name not in self.values:
                kept += args[index : index + length]
            index += length
        return [*self._positionals(positionals, syntax), *kept, *self._options(syntax, varied)]

    def _positionals(self, typed: Sequence[str], syntax: Syntax) -> list[str]:
        """Return positionals up to the last one that either side has; one in between that neither has ends the list."""
        values: list[str] = []
        for index, name in enumerate(syntax.positionals):
            if name in self.values:
                values += each(self.values[name])
            elif index < len(typed):
                values.append(typed[index])
            else:
                break
        return values

    def _options(self, syntax: Syntax, varied: set[str]) -> list[str]:
        first = {name: spelling for spelling, name in reversed(list(syntax.options.items()))}
        names = [name for name in self.values if name in first and name not in varied]
        return [word for name in names for value in each(self.values[name]) for word in (first[name], value)]


def each(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True)
class OtherLoad:
    """Processor time of other programs, in processors."""

    processors: float
    of: int

    @property
    def is_busy(self) -> bool:
        return self.processors > BUSY_SHARE * self.of

    @property
    def sentence(self) -> str:
        return (
            f"Other programs kept {min(self.processors, self.of):.1f} of {self.of} processors busy during this run, so "
            "its times are longer and less regular than on an idle machine."
        )


class LoadMeter:
    """Measures other programs' processor time from its creation on."""

    def __init__(self, statistics: Path = Path("/proc/stat")):
        self._statistics = statistics
        self._load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        self._began, self._busy, self._own = time.monotonic(), self._busy_seconds(), _own_seconds()

    def read(self) -> OtherLoad:
        seconds, busy = time.monotonic() - self._began, self._busy_seconds()
        of = os.cpu_count() or 1
        if seconds < SHORTEST_SECONDS:
            return OtherLoad(0.0, of)
        if busy is None or self._busy is None:
            return OtherLoad(self._load_average, of)
        other_seconds = (busy - self._busy) - (_own_seconds() - self._own)
        return OtherLoad(max(0.0, other_seconds / seconds), of)

    def _busy_seconds(self) -> float | None:
        """Return the busy seconds of all processors since the system started."""
        try:
            name, user, nice, system, _idle, _iowait, interrupts, soft, stolen, *_ = (
                self._statistics.read_text().splitlines()[0].split()
            )
            ticks = sum(map(int, (user, nice, system, interrupts, soft, stolen)))
        except (OSError, ValueError, IndexError):
            return None
        return ticks / os.sysconf("SC_CLK_TCK") if name == "cpu" else None


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def model_facts(name: str = DEFAULT_MODEL, kv_dtype: str | None = None, device: str = "cpu") -> dict[str, Any]:
    """Read the header of the model's file. kv_dtype: the device's own if None. Raises what `resolve_model` and
    `open_weights` raise."""
    if is_hash_model(name):
        from forge.tokenizer.byte_tokenizer import VOCAB_SIZE

        # The shape of its cache: one number for a key, one for a value.
        return _facts(name, kv_dtype or "float32", num_layers=1, num_kv_heads=1, head_dim=1, vocab_size=VOCAB_SIZE)
    from forge.model.loader import open_weights

    path = resolve_model(name)
    with open_weights(path) as source:
        config = source.config
        return _facts(
            model_name(path),
            kv_dtype or DEFAULT_KV_DTYPES[device],
            num_kv_heads=config.num_key_value_heads,
            **picked(config, "num_layers", "head_dim", "vocab_size"),
            **picked(config, "num_attention_heads", "hidden_size", "intermediate_size"),
            weight_bytes=source.nbytes,
        )


def _facts(name: str, kv_dtype: str, num_layers: int, num_kv_heads: int, head_dim: int, **more: int) -> dict[str, Any]:
    return {
        "name": name,
        "has_weights": not is_hash_model(name),
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "bytes_per_number": KV_ITEM_BYTES[kv_dtype],
        "scale_bytes": vector_bytes(head_dim, kv_dtype) - head_dim * KV_ITEM_BYTES[kv_dtype],
        "kv_bytes_per_token": 2 * num_layers * num_kv_heads * vector_bytes(head_dim, kv_dtype),
        "num_attention_heads": 0,
        "hidden_size": 0,
        "intermediate_size": 0,
        "weight_bytes": 0,
    } | more
