"""`forge kernels --layer`: the operations of one layer in order, as the reference runs them and as the kernels do.

One row decodes after some tokens whose keys and values it reads. Shapes and bytes are those of the arrays that an
operation was given; each byte that it reads or writes counts once. Times are the shortest of several passes with a
clock around every operation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.text import Text

from forge.model.operation_time import Operand, OperationTime
from forge.views.formatting import ms, plural, size, times
from forge.views.json_output import as_object, picked
from forge.views.palette import ACCENT, QUIET, TITLE
from forge.views.screen import Part, Report, Table, report, sentences, title

DEVICES = ("reference", "cpu")
CONTEXT = 64
"""Tokens before the row."""
PASSES = 20
QUESTION = "What does one layer do, operation by operation?"


@dataclass(frozen=True)
class LayerOperation:
    """One operation of the layer, in its place."""

    operation: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    ms: float
    """Milliseconds of the shortest pass."""

    @property
    def bytes_read(self) -> int:
        return sum(operand.nbytes for operand in self.reads)

    @property
    def bytes_written(self) -> int:
        return sum(operand.nbytes for operand in self.writes)

    @property
    def shapes(self) -> str:
        """The shapes that it reads → those that it writes: `1×128 192×128 → 1×192`."""
        return f"{_shapes(self.reads)} → {_shapes(self.writes)}"


@dataclass(frozen=True)
class Layer:
    """A layer as one backend runs it."""

    device: str
    description: str
    kv_dtype: str
    operations: tuple[LayerOperation, ...]

    @cached_property
    def bytes_read(self) -> int:
        return sum(operation.bytes_read for operation in self.operations)

    @cached_property
    def bytes_written(self) -> int:
        return sum(operation.bytes_written for operation in self.operations)

    @cached_property
    def ms(self) -> float:
        return sum(operation.ms for operation in self.operations)


@dataclass(frozen=True)
class LayerResult:
    """The same layer of one model on each of `DEVICES`."""

    model: str
    layer: int
    context: int
    layers: tuple[Layer, ...]


def layer_report(path: Path, threads: int | None) -> Report:
    """Run the model's middle layer on each of `DEVICES`."""
    result = run(path, threads)
    return report(layer_object(result), lambda: screen(result))


def run(path: Path, threads: int | None = None) -> LayerResult:
    """Measure the middle layer of the model at `path`."""
    from forge.model.catalog import model_name

    measured = [_measure(path, device, threads) for device in DEVICES]
    _, context, layer = measured[0]
    return LayerResult(model_name(path), layer, context, tuple(layer for layer, _, _ in measured))


def _measure(path: Path, device: str, threads: int | None) -> tuple[Layer, int, int]:
    from forge.bench.cases import BLOCK_SIZE, Case
    from forge.bench.forge_worker import batch_of
    from forge.llm import LLM

    llm = LLM(path, device=device, threads=threads if device == "cpu" else None, max_num_seqs=1)
    context = min(CONTEXT, llm.max_model_len - 1)
    case = Case("layer", "1 row", "decode", sequences=1, context=context, tokens=1)
    blocks = -(-case.length // BLOCK_SIZE)
    [token_ids] = case.token_ids(llm.model.vocab_size)
    storage = llm.model.new_storage(llm.model.kv_layout(blocks, BLOCK_SIZE, llm.kv_dtype))
    llm.model.forward(batch_of([token_ids[:context]], 0, blocks), storage)
    row, layer = batch_of([token_ids[context:]], context, blocks), llm.model.num_layers // 2
    passes: list[list[OperationTime]] = []
    for _ in range(PASSES):
        llm.time_operations()
        llm.model.forward(row, storage)
        passes.append([entry for entry in llm.operation_times() if entry.layer == layer])
    operations = tuple(
        LayerOperation(turns[0].operation, turns[0].reads, turns[0].writes, min(turn.ms for turn in turns))
        for turns in zip(*passes, strict=True)
    )
    return Layer(device, llm.device_description, llm.kv_dtype, operations), context, layer


def layer_object(result: LayerResult) -> dict[str, Any]:
    """The experiment as facts."""
    layers = [
        as_object(layer, *_SUMS) | {"operations": [_operation_object(operation) for operation in layer.operations]}
        for layer in result.layers
    ]
    return picked(result, "model", "layer", "context") | {"layers": layers}


_SUMS = ("bytes_read", "bytes_written", "ms")


def _operation_object(operation: LayerOperation) -> dict[str, Any]:
    lists = {"reads": _operands(operation.reads), "writes": _operands(operation.writes)}
    return picked(operation, "operation", *_SUMS) | lists


def screen(result: LayerResult) -> Iterator[Part]:
    """Draw a table for each backend, and compare the backends."""
    yield from (title(QUESTION), f"{result.model}, layer {result.layer}, 1 row after {plural(result.context, 'token')}")
    columns = ("operation: {operation}", "reads → writes: {shapes}", "read: {bytes_read:size}")
    for layer in result.layers:
        about = f"  {layer.description}, keys and values in {layer.kv_dtype}"
        yield from (None, Text.assemble((layer.device, TITLE), (about, QUIET)))
        more = ("written: {bytes_written:size}", "ms: {ms:ms}")
        yield Table.of(layer.operations, *columns, *more, names=2, styles={4: ACCENT}, wraps=True)
    yield None
    yield from sentences([*map(total_sentence, result.layers), comparison_sentence(*result.layers)])


def total_sentence(layer: Layer) -> str:
    return (
        f"{layer.device}: {plural(len(layer.operations), 'operation')} read {size(layer.bytes_read)} and write "
        f"{size(layer.bytes_written)} in {ms(layer.ms)} ms."
    )


def comparison_sentence(reference: Layer, compiled: Layer) -> str:
    fewer, faster = times(reference.bytes_read / compiled.bytes_read), times(reference.ms / compiled.ms)
    return (
        f"Compiled, {len(reference.operations)} operations are {len(compiled.operations)}: what one hands to the next "
        f"inside a kernel goes through no memory. They read {fewer} fewer bytes and are {faster} as fast."
    )


def _shapes(operands: Sequence[Operand]) -> str:
    return " ".join("×".join(map(str, operand.shape)) for operand in operands)


def _operands(operands: Sequence[Operand]) -> list[dict[str, Any]]:
    return [{"shape": list(operand.shape), "bytes": operand.nbytes} for operand in operands]
