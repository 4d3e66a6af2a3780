"""Compile what a Qwen3 would launch, for the compute capabilities named, and print what it takes as JSON lines.

A process of its own: kernels defined under the interpreter cannot be compiled.
"""

import json
import sys
from dataclasses import asdict

from forge.backends.cuda.ahead_of_time import Launch
from forge.backends.cuda.shapes import Tuning
from forge.gguf import GGMLType
from forge.model.config import Qwen3Config
from forge.model.manual_batch import Part, flat_batch
from tests.backends.cuda.compiled import compile_for, launched_by

QWEN3_0_6B = Qwen3Config(151936, 1024, 3072, 2, 16, 8, 128, 1e-6, 1e6, 40960, True)
QWEN3_4B = Qwen3Config(151936, 2560, 9728, 2, 32, 8, 128, 1e-6, 1e6, 40960, True)
"""Of two layers: the last one computes logit rows alone, and those before it launch the same as the first."""


def decode(rows: int, context: int):
    table = list(range(-(-context // 16)))
    return flat_batch([Part(list(range(context)), context - 1, context, table) for _ in range(rows)], 16)


def prefill(length: int):
    table = list(range(-(-length // 16)))
    return flat_batch([Part(list(range(length)), 0, length, table)], 16, logit_rows=[length - 1])


EVERY_SWITCH = Tuning(
    split_k=True, prefetch=True, round_splits_up=True, new_key_last=True, fine_buckets=True, tile_rows=128
)
BATCHES = [decode(1, 2048), decode(16, 160), decode(64, 160), prefill(128), prefill(512), prefill(4096)]


def launches() -> list[Launch]:
    """Each kernel once per kind of weight and set of flags, in its largest tile; attention in each of its tiles."""
    listed = [
        launch
        for config, kind, batches, options in (
            (QWEN3_0_6B, GGMLType.BF16, BATCHES, {}),
            (QWEN3_4B, GGMLType.BF16, BATCHES, {}),
            (QWEN3_4B, GGMLType.BF16, BATCHES, {"invariant": True}),
            (QWEN3_4B, GGMLType.BF16, BATCHES, {"dtype": "float32"}),
            (QWEN3_4B, GGMLType.Q8_0, BATCHES, {}),
            (QWEN3_4B, GGMLType.Q4_K, BATCHES, {}),
            (QWEN3_0_6B, GGMLType.BF16, [decode(1, 2048), decode(4, 160)], {"tuning": EVERY_SWITCH}),
            (QWEN3_0_6B, GGMLType.Q4_K, [decode(4, 160)], {"tuning": EVERY_SWITCH}),
        )
        for launch in launched_by(config, kind, batches, **options)
    ]
    largest: dict[tuple, Launch] = {}
    for launch in listed:
        sizes = {name: value for name, value in launch.constants if name.startswith("BLOCK")}
        constants = dict(launch.constants)
        apart = (
            ["EXACT"]
            if constants.get("EXACT")
            else ["KIND", "NORM", "GLU", "COMPACT", "SPLIT_K", "PREFETCH", "NEWEST", "MASKED"]
        )
        apart += ["BLOCK_M"] if "ROWS" in constants else []
        kind = tuple((name, value) for name, value in launch.constants if name in apart)
        area = sizes.get("BLOCK_M", 1) * sizes.get("BLOCK_N", 1) * sizes.get("BLOCK_K", 1)
        best = largest.setdefault((launch.kernel, kind), launch)
        best_sizes = dict(best.constants)
        if area > best_sizes.get("BLOCK_M", 1) * best_sizes.get("BLOCK_N", 1) * best_sizes.get("BLOCK_K", 1):
            largest[launch.kernel, kind] = launch
    return list(largest.values())


if __name__ == "__main__":
    for launch in launches():
        for capability in map(int, sys.argv[1:]):
            occupied = compile_for(launch, capability)
            print(json.dumps({"launch": launch.name, "capability": capability, **asdict(occupied)}), flush=True)
