"""Which tile suits each product of a model on this GPU: `python -m forge.bench.cuda_tiles`.

Every product of a decode step is timed with the tile that `forge.backends.cuda.shapes` chooses and with its neighbours:
half and twice the rows, columns and warps. A pass goes over copies of the matrix that are larger together than any
cache, in one CUDA graph, so that weights come from memory and no launch is waited for, as in a decode step. What it
finds belongs into `shapes.py`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from forge.backends.cuda.inputs import Policy
from forge.backends.cuda.launches import Launches, TritonLauncher
from forge.backends.cuda.network import Norm
from forge.backends.cuda.rotations import Rotations
from forge.backends.cuda.shapes import Tile
from forge.backends.cuda.weights import KIND_NAMES, Matrix
from forge.bench.cuda_limits_worker import fastest
from forge.bench.drawn_model import copy_of, drawn_matrix
from forge.model.config import Qwen3Config
from forge.model.synth import SHAPES

LEAST_BYTES = 512 << 20
"""Of all copies of a matrix together: ten times an H200's second-level cache."""


@dataclass(frozen=True)
class Timed:
    """One product with one tile."""

    product: str
    rows: int
    tile: Tile
    seconds: float
    bytes_per_second: float
    is_chosen: bool
    """Whether it is what `shapes` chooses."""


class TriedLaunches(Launches):
    """Launches with a tile that somebody else chose."""

    tried: Tile | None = None

    def tile_for(self, num_rows: int, matrix: Matrix) -> Tile:
        return self.tried or super().tile_for(num_rows, matrix)


def measure(
    config: Qwen3Config,
    kind: int,
    rows: Sequence[int],
    device: str = "cuda",
    clock: Callable[[Callable[[], None]], float] | None = None,
    least_bytes: int = LEAST_BYTES,
) -> Iterator[Timed]:
    """Every product, number of rows and tile. clock: seconds of a call of what it is given."""
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    properties = torch.cuda.get_device_properties(where) if on_gpu else None
    multiprocessors = properties.multi_processor_count if on_gpu else 2
    dependent = on_gpu and (properties.major, properties.minor) >= (9, 0)
    policy = Policy(config.num_attention_heads, config.num_key_value_heads, multiprocessors, False, False)
    launcher = TritonLauncher(dependent)
    run = TriedLaunches(None, policy, Rotations(where), where, torch.bfloat16, launcher, exact=not on_gpu)
    for name, (height, width) in products_of(config).items():
        first = drawn_matrix(name, height, width, kind, where)
        copies = [first] + [copy_of(first) for _ in range(least_bytes // first.read_bytes)]
        for num_rows in rows:
            run.tried = None
            chosen = run.tile_for(num_rows, first)
            call = partial(multiply_all, run, name, copies, num_rows, config, where)
            for tile in neighbours(chosen):
                run.tried = tile
                try:
                    seconds = (clock or seconds_in_a_graph)(call) / len(copies)
                except Exception:  # a tile that asks for more than a multiprocessor has
                    continue
                yield Timed(name, num_rows, tile, seconds, first.read_bytes / seconds, tile == chosen)


def products_of(config: Qwen3Config) -> dict[str, tuple[int, int]]:
    """Rows and columns of every product of a decode step."""
    return {
        "qkv": (config.query_size + 2 * config.key_value_size, config.hidden_size),
        "output": (config.hidden_size, config.query_size),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }


def neighbours(tile: Tile) -> list[Tile]:
    """The tile, and those that differ in one or two of its sizes by a factor of two."""
    least = 2 if tile.block_m == 1 else 16
    found = [tile]
    for block_n in (tile.block_n // 2, tile.block_n, tile.block_n * 2):
        for block_k in (tile.block_k // 2, tile.block_k, tile.block_k * 2):
            for num_warps in (tile.num_warps // 2, tile.num_warps, tile.num_warps * 2):
                if block_n >= least and block_k >= 32:
                    found.append(replace(tile, block_n=block_n, block_k=block_k, num_warps=num_warps))
    if tile.block_m > 1:
        found += [replace(tile, num_stages=stages) for stages in (2, 3, 5)]
    return list(dict.fromkeys(found))


def multiply_all(
    run: Launches, name: str, copies: Sequence[Matrix], num_rows: int, config: Qwen3Config, device: torch.device
) -> None:
    """The product as a decode step does it, once for every copy."""
    x = torch.ones((num_rows, copies[0].columns), dtype=torch.bfloat16, device=device)
    stream = torch.zeros((num_rows, copies[0].rows), dtype=torch.bfloat16, device=device)
    norm = Norm(torch.ones(copies[0].columns, device=device), config.rms_norm_eps)
    for matrix in copies:
        if name in ("output", "down"):
            run.add_product(stream, x, matrix)
        elif name == "gate_up":
            run.gated(x, norm, matrix)
        elif name == "head":
            run.logits(x, norm, matrix)
        else:
            run.products(x, norm, (matrix,))


def seconds_in_a_graph(call: Callable[[], None]) -> float:
    """Seconds of one replay of everything that `call` launches."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return fastest(torch, graph.replay, 0.02)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forge.bench.cuda_tiles", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--kind", default="dense", choices=KIND_NAMES)
    parser.add_argument("--rows", default="1,4,16", help="numbers of rows, with commas")
    given = parser.parse_args()
    rows = [int(number) for number in given.rows.split(",")]
    found: dict[tuple[str, int], list[Timed]] = {}
    with torch.inference_mode():
        for each in measure(SHAPES[given.shape], KIND_NAMES.index(given.kind), rows):
            found.setdefault((each.product, each.rows), []).append(each)
    for (product, num_rows), tried in found.items():
        fastest_first = sorted(tried, key=lambda each: each.seconds)
        shown = fastest_first[:3] + [each for each in fastest_first[3:] if each.is_chosen]
        for each in shown:
            tile = each.tile
            print(
                f"{product:8} {num_rows:2} rows  {each.seconds * 1e6:8.1f} µs  "
                f"{each.bytes_per_second / 1e12:5.2f} TB/s  "
                f"{tile.block_n:3} x {tile.block_k:4}, {tile.num_warps} warps, {tile.num_stages} stages"
                f"{'  ← chosen' if each.is_chosen else ''}"
            )


if __name__ == "__main__":
    main()
