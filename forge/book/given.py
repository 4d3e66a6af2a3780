"""What a chapter knows without a run: the shape of its model (`{{model.num_layers}}` in a question), and the processor
time that other programs took while an experiment ran (`machine.busy`).

Linux counts the time of all programs in `/proc/stat`; what this process and its children took is subtracted. Where
there is no such file the load average of the minute before counts.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.cache.kv_storage import DEFAULT_KV_DTYPE, KV_ITEM_BYTES, vector_bytes
from forge.model.catalog import DEFAULT_MODEL, is_hash_model, model_name, resolve_model
from forge.views.json_output import picked

BUSY_SHARE = 0.25
"""Other programs' share of all processors from which on a run counts as disturbed."""
SHORTEST_SECONDS = 0.2
"""A shorter run is not judged: the system counts hundredths of a second."""


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


def model_facts(name: str = DEFAULT_MODEL, kv_dtype: str | None = None) -> dict[str, Any]:
    """Read the header of the model's file. Raises what `resolve_model` and `open_weights` raise."""
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
            kv_dtype or DEFAULT_KV_DTYPE,
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
        "kv_bytes_per_token": 2 * num_layers * num_kv_heads * vector_bytes(head_dim, kv_dtype),
        "num_attention_heads": 0,
        "hidden_size": 0,
        "intermediate_size": 0,
        "weight_bytes": 0,
    } | more
