"""What an operation of a recorded pass reads and writes, by its arguments and the batch: for `forge kernels --layer`.

A buffer has two forms. Its float32 values are 4 bytes an element; quantized, its int8 quants with their scales and
sums are 1.5. Each byte counts once, however often threads read it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from forge.backends.cpu import kernel_table as k
from forge.backends.cpu.packing import FloatMatrix, PackedMatrix, QuantizedMatrix
from forge.backends.cpu.program import Buffer, Operation
from forge.backends.cpu.tiles import GROUP
from forge.model.backend import Operand

_READ_QUANTS = (k.matmul_quantized, k.gate_up_swiglu, k.experts_quantized)
"""They read the quantized form of `x`."""
_WRITE_BOTH = (k.rms_norm, k.swiglu, k.gather)
"""They write values, and the quantized form too if a product reads it."""
_WRITE_QUANTS = (k.gate_up_swiglu, k.quantize)
_IN_PLACE = {k.quantize: ("x",), k.norm_rope_store: ("q", "k")}
"""Arguments that are read and written."""
_WRITTEN = {k.route: ("experts", "shares"), k.sort_by_expert: ("places", "sources", "starts")}
"""Arguments that are written; of other kernels it is `out`."""
_EMBEDS, _ADDS = (k.embed_quantized, k.embed_float), (k.combine,)


class Traffic:
    """Counts for the operations of one batch."""

    def __init__(self, context: Any, quantized: set[Buffer], num_keys: int, num_written: int):
        """context: the batch context. quantized: the buffers that have that form. num_keys: positions that attention
        reads, of all sequences together. num_written: rows that have a slot."""
        self._context, self._quantized = context, quantized
        self._num_keys, self._num_written = num_keys, num_written

    def reads(self, operation: Operation) -> tuple[Operand, ...]:
        return tuple(self._reads(operation))

    def writes(self, operation: Operation) -> tuple[Operand, ...]:
        return tuple(self._writes(operation))

    def _reads(self, operation: Operation) -> Iterator[Operand]:
        kernel, arguments = operation.kernel, operation.arguments
        if kernel in _EMBEDS:
            yield self._embedded(arguments)
            return
        written = _WRITTEN.get(kernel, ("out",)) if not arguments.get("adds") and kernel not in _ADDS else ()
        for name, argument in arguments.items():
            if isinstance(argument, Buffer) and name not in written:
                yield from self._forms(
                    argument, self._num_rows(operation, argument), *self._forms_read(operation, name)
                )
            elif isinstance(argument, FloatMatrix | QuantizedMatrix):
                yield _matrix(argument, arguments)
            elif isinstance(argument, np.ndarray) and name not in written:
                yield Operand(argument.shape, argument.nbytes)
        if kernel is k.norm_rope_store:
            rows, half = self._context.num_rows, arguments["head_dim"] // 2
            yield from [Operand((rows, half), 4 * rows * half)] * 2  # cosines and sines
        if kernel is k.attention:
            yield from self._stored(arguments, self._num_keys)

    def _writes(self, operation: Operation) -> Iterator[Operand]:
        kernel = operation.kernel
        for name in _IN_PLACE.get(kernel, _WRITTEN.get(kernel, ("out",))):
            argument = operation.arguments[name]
            if isinstance(argument, Buffer):
                values = kernel not in _WRITE_QUANTS and operation.arguments.get("copies_values", True)
                quants = kernel in _WRITE_QUANTS or (kernel in _WRITE_BOTH and argument in self._quantized)
                yield from self._forms(argument, self._num_rows(operation, argument), values, quants)
            else:
                yield Operand(argument.shape, argument.nbytes)
        if kernel is k.norm_rope_store:
            yield from self._stored(operation.arguments, self._num_written)

    def _forms_read(self, operation: Operation, name: str) -> tuple[bool, bool]:
        """Whether an operation reads a buffer's values, and whether its quantized form."""
        if operation.kernel is k.gather and name == "x":
            return operation.arguments["copies_values"], operation.arguments["out"] in self._quantized
        quants = name == "x" and operation.kernel in _READ_QUANTS
        return not quants, quants

    def _num_rows(self, operation: Operation, buffer: Buffer) -> int:
        """Of a buffer; an operation that picks rows reads as many as it writes."""
        picks = operation.kernel is k.gather or operation.arguments.get("logit_rows_only")
        return int(getattr(self._context, (operation.arguments["out"] if picks else buffer).count))

    def _forms(self, buffer: Buffer, rows: int, values: bool, quants: bool) -> Iterator[Operand]:
        shape = rows, buffer.width
        if values:
            yield Operand(shape, 4 * rows * buffer.width)
        if quants:
            yield Operand(shape, rows * (buffer.width + 8 * (buffer.stride // GROUP) + 4 * (buffer.stride // 16)))

    def _stored(self, arguments: dict[str, Any], tokens: int) -> list[Operand]:
        """Keys and values of so many tokens."""
        shape = tokens, arguments["kv_heads"], arguments["head_dim"]
        return [Operand(shape, tokens * arguments["kv_heads"] * self._context.cache.row_bytes)] * 2

    def _embedded(self, arguments: dict[str, Any]) -> Operand:
        """The batch's rows of the embedding."""
        arrays = [argument for argument in arguments.values() if isinstance(argument, np.ndarray)]
        row_bytes = sum(array.nbytes for array in arrays) // (16 * len(arguments["table"]))
        return Operand((self._context.num_rows, arguments["columns"]), self._context.num_rows * row_bytes)


def _matrix(matrix: PackedMatrix, arguments: dict[str, Any]) -> Operand:
    """A weight matrix; of those of all experts the ones that have rows."""
    share = 1.0
    if "tiles_each" in arguments:
        share = np.count_nonzero(np.diff(arguments["starts"])) / arguments["num_experts"]
    return Operand((round(matrix.rows * share), matrix.columns), round(matrix.nbytes * share))
