"""Compile what a Qwen3 would launch, for the compute capabilities named, and print what it takes as JSON lines.

A process of its own: kernels defined under the interpreter cannot be compiled.
"""

import json
import sys
from dataclasses import asdict
from math import prod

from forge.backends.cuda.shapes import Tuning
from forge.backends.cuda.warm_up import LaunchDescription
from forge.gguf import GGMLType
from forge.model.config import Qwen3Config
from forge.model.manual_batch import Part, flat_batch
from tests.backends.cuda.compiled import compile_for, constants_of, launched_by, name_of

QWEN3_0_6B = Qwen3Config(151936, 1024, 3072, 2, 16, 8, 128, 1e-6, 1e6, 40960, True)
QWEN3_4B = Qwen3Config(151936, 2560, 9728, 2, 32, 8, 128, 1e-6, 1e6, 40960, True)
"""Of two layers: the last one computes logit rows alone, and those before it launch the same as the first."""


def decode(rows: int, context: int):
    table = list(range(-(-context // 16)))
    return flat_batch([Part(list(range(context)), context - 1, context, table) for _ in range(rows)], 16)


def prefill(length: int):
    table = list(range(-(-length // 16)))
    return flat_batch([Part(list(range(length)), 0, length, table)], 16, logit_rows=[length - 1])


EVERY_SWITCH = Tuning(prefetch=True, new_key_last=True, fine_buckets=True, tile_rows=128)
BATCHES = [decode(1, 2048), decode(16, 160), decode(64, 160), prefill(128), prefill(512), prefill(4096)]


def launches(capability: int) -> list[LaunchDescription]:
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
        for launch in launched_by(config, kind, batches, capability, **options)
    ]
    largest: dict[tuple, LaunchDescription] = {}
    for launch in listed:
        constants = constants_of(launch)
        apart = (
            ["EXACT"] if constants.get("EXACT") else ["KIND", "NORM", "GLU", "COMPACT", "PREFETCH", "NEWEST", "MASKED"]
        )
        apart += ["BLOCK_M"] if "ROWS" in constants else []
        kind = tuple((name, value) for name, value in constants.items() if name in apart)
        if area(launch) > area(largest.setdefault((launch.kernel, kind), launch)):
            largest[launch.kernel, kind] = launch
    return list(largest.values())


def area(launch: LaunchDescription) -> int:
    return prod(constants_of(launch).get(f"BLOCK_{side}", 1) for side in "MNK")


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        for launch in launches(capability):
            occupied = compile_for(launch, capability)
            print(json.dumps({"launch": name_of(launch), "capability": capability, **asdict(occupied)}), flush=True)
