"""Which tile suits each product of a model on this GPU: `python -m forge.bench.cuda_tiles`.

Every product of a decode step is timed with the tile that `forge.backends.cuda.shapes` chooses and with its neighbours:
half and twice the rows, columns and warps. A pass goes over copies of the matrix that are larger together than any
cache, in one CUDA graph, so that weights come from memory and no launch is waited for, as in a decode step. Kernels are
compiled in parallel first; each time is printed as it is found. What it finds belongs into `shapes.py`.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from forge.backends.cuda import warm_up
from forge.backends.cuda.inputs import Policy
from forge.backends.cuda.launches import LaunchDescription, Launches, ListingLauncher, TritonLauncher
from forge.backends.cuda.network import Network, Norm
from forge.backends.cuda.rotations import Rotations
from forge.backends.cuda.shapes import Tile
from forge.backends.cuda.weights import DENSE, KIND_NAMES, Matrix
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
    tile: Tile | None
    """None for cuBLAS, with kernels of its own for what is fused elsewhere."""
    seconds: float
    bytes_per_second: float
    is_chosen: bool
    """Whether it is what `shapes` chooses."""
    failed: str | None = None
    """Why it could not be timed: a tile that asks for more than a multiprocessor has, say."""

    def __str__(self) -> str:
        tile = "cuBLAS"
        if self.tile is not None:
            n, k = self.tile.block_n, self.tile.block_k
            tile = f"{n:3} x {k:4}, {self.tile.num_warps} warps, {self.tile.num_stages} stages"
        timing = f"{self.seconds * 1e6:8.1f} µs  {self.bytes_per_second / 1e12:5.2f} TB/s"
        mark = "  ← chosen" if self.is_chosen else ""
        return f"{self.product:11} {self.rows:3} rows  {self.failed or timing}  {tile}{mark}"


class TriedLaunches(Launches):
    """Launches with a tile that the search chose."""

    tried: Tile | None = None
    by_cublas: bool | None = None

    def tile_for(self, num_rows: int, matrix: Matrix) -> Tile:
        return self.tried or super().tile_for(num_rows, matrix)

    def _by_cublas(self, num_rows: int, matrix: Matrix) -> bool:
        return super()._by_cublas(num_rows, matrix) if self.by_cublas is None else self.by_cublas


def measure(
    config: Qwen3Config,
    kind: int,
    rows: Sequence[int],
    device: str = "cuda",
    clock: Callable[[Callable[[], None]], float] | None = None,
    least_bytes: int = LEAST_BYTES,
    compile_all: Callable[[Iterable[LaunchDescription]], object] = lambda launches: None,
) -> Iterator[Timed]:
    """Every product, number of rows and tile, and of dense matrices cuBLAS too. clock: seconds of a call of what it is
    given. compile_all: compiles in parallel what is about to be launched."""
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    properties = torch.cuda.get_device_properties(where) if on_gpu else None
    multiprocessors = properties.multi_processor_count if properties else 2
    dependent = properties is not None and (properties.major, properties.minor) >= (9, 0)
    policy = Policy(config.num_attention_heads, config.num_key_value_heads, multiprocessors, False, False)
    launcher = TritonLauncher(dependent)
    nowhere = cast(Network, None)  # products need no network
    run = TriedLaunches(nowhere, policy, Rotations(where), where, torch.bfloat16, launcher, exact=not on_gpu)
    for name, (height, width) in products_of(config).items():
        first = drawn_matrix(name, height, width, kind, where)
        listing = ListingLauncher(dependent)
        for num_rows, tile, _ in _tried(run, first, rows):
            listed = run.with_launcher(listing)
            listed.tried, listed.by_cublas = tile, tile is None
            multiply_all(listed, name, [first], num_rows, config, where)
        compile_all(listing.found)
        copies = [first] + [copy_of(first) for _ in range(least_bytes // first.read_bytes)]
        for num_rows, tile, is_chosen in _tried(run, first, rows):
            run.tried, run.by_cublas = tile, tile is None
            call = partial(multiply_all, run, name, copies, num_rows, config, where)
            try:
                seconds = (clock or seconds_in_a_graph)(call) / len(copies)
                yield Timed(name, num_rows, tile, seconds, first.read_bytes / seconds, is_chosen)
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
                yield Timed(name, num_rows, tile, float("inf"), 0.0, is_chosen, reason)


def _tried(run: TriedLaunches, matrix: Matrix, rows: Sequence[int]) -> Iterator[tuple[int, Tile | None, bool]]:
    """Rows, tile and whether it is chosen; the output head is never cuBLAS's."""
    for num_rows in rows:
        run.tried = run.by_cublas = None
        chosen, by_cublas = (
            run.tile_for(num_rows, matrix),
            run._by_cublas(num_rows, matrix) and matrix.name != "output_head",
        )
        for tile in neighbours(chosen):
            yield num_rows, tile, tile == chosen and not by_cublas
        if num_rows > 1 and matrix.kind == DENSE and matrix.name != "output_head":
            yield num_rows, None, by_cublas


def products_of(config: Qwen3Config) -> dict[str, tuple[int, int]]:
    """Return rows and columns of every product of a decode step."""
    return {
        "qkv": (config.query_size + 2 * config.key_value_size, config.hidden_size),
        "output": (config.hidden_size, config.query_size),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "output_head": (config.vocab_size, config.hidden_size),
    }


def neighbours(tile: Tile) -> list[Tile]:
    """Return the tile, and those that differ in one or two of its sizes by a factor of two."""
    least = 2 if tile.block_m == 1 else 16
    tiles = [tile]
    for block_n in (tile.block_n // 2, tile.block_n, tile.block_n * 2):
        for block_k in (tile.block_k // 2, tile.block_k, tile.block_k * 2):
            for num_warps in (tile.num_warps // 2, tile.num_warps, tile.num_warps * 2):
                if block_n >= least and block_k >= 32:
                    tiles.append(replace(tile, block_n=block_n, block_k=block_k, num_warps=num_warps))
    if tile.block_m > 1:
        tiles += [replace(tile, num_stages=stages) for stages in (2, 3, 5)]
    return list(dict.fromkeys(tiles))


def multiply_all(
    run: Launches, name: str, copies: Sequence[Matrix], num_rows: int, config: Qwen3Config, device: torch.device
) -> None:
    """The product as a decode step does it, once for every copy."""
    x = torch.ones((num_rows, copies[0].in_features), dtype=torch.bfloat16, device=device)
    stream = torch.zeros((num_rows, copies[0].out_features), dtype=torch.bfloat16, device=device)
    norm = Norm(torch.ones(copies[0].in_features, device=device), config.rms_norm_eps)
    for matrix in copies:
        if name in ("output", "down"):
            run.add_product(stream, x, matrix)
        elif name == "gate_up":
            run.gated(x, norm, matrix)
        elif name == "output_head":
            run.logits(x, norm, matrix)
        else:
            run.products(x, norm, (matrix,))


def best_of(timings: Sequence[Timed]) -> list[Timed]:
    """Return the three fastest of each product and number of rows, and the chosen one."""
    groups: dict[tuple[str, int], list[Timed]] = {}
    for timing in timings:
        groups.setdefault((timing.product, timing.rows), []).append(timing)
    kept = []
    for group in groups.values():
        ordered = sorted(group, key=lambda timing: timing.seconds)
        kept += ordered[:3] + [timing for timing in ordered[3:] if timing.is_chosen]
    return kept


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
    arguments = parser.parse_args()
    rows = [int(number) for number in arguments.rows.split(",")]
    with torch.inference_mode():
        timings = []
        config, kind = SHAPES[arguments.shape], KIND_NAMES.index(arguments.kind)
        for timing in measure(config, kind, rows, compile_all=warm_up.compile_all):
            print(timing, flush=True)
            timings.append(timing)
    print("\nthe fastest of each, and what is chosen")
    for timing in best_of(timings):
        print(timing)


if __name__ == "__main__":
    main()
