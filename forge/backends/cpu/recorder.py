"""Recording: the model's forward pass, run once on names instead of numbers, becomes a program.

Run eagerly a forward pass would be some 500 calls from Python for every token of a 0.6B model. The recorder is called
once, with the fused operations of `forge.backends.fusion`, and writes down which kernels compute them. It knows what
follows what, so that

- a norm is quantized on the spot if a quantized product reads it, once for all products that do;
- a product that a residual is added to adds into it;
- the gate and up products, SwiGLU and its quantization are one kernel.

What comes out is a table of operations over fixed buffers, which the threads go through without Python
(`thread_pool.py`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forge.backends.cpu import kernel_table as k
from forge.backends.cpu.op_layout import BFLOAT16, FLOAT16, FLOAT32, GLU_GROUPS
from forge.backends.cpu.packing import FloatMatrix, QuantizedMatrix
from forge.backends.cpu.program import Buffer, ExpertMatrices, Matrix, Operation, Recording, quantizes_heads
from forge.backends.cpu.tiles import GROUP
from forge.backends.fusion import Experts, FusedOperations, Norm, Source
from forge.model.rope import Rope

_EXPERTS = {"f32": k.experts_f32, "f16": k.experts_f16, "bf16": k.experts_bf16, "quantized": k.experts_quantized}
_MATMUL = {"f32": k.matmul_f32, "f16": k.matmul_f16, "bf16": k.matmul_bf16, "quantized": k.matmul_quantized}
_KIND = {"f32": FLOAT32, "f16": FLOAT16, "bf16": BFLOAT16}
_QUANTIZING_KERNELS = (k.rms_norm, k.attention, k.swiglu)
"""Kernels that quantize what they write where a quantized product reads it."""


class Recorder(FusedOperations):
    """Implements the fused operations by writing them down instead of computing."""

    def __init__(self, num_kv_heads: int, head_dim: int):
        self.recording = Recording()
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._layer = -1

    # The fused operations

    def begin_layer(self, index: int) -> None:
        self._layer = index

    def embed(self, table: Matrix) -> Buffer:
        self._use(table)
        packed = table.packed
        out = Buffer(packed.columns)
        if isinstance(packed, FloatMatrix):
            columns, kind = packed.values.shape[1], _KIND[packed.kind]
            self._step(k.embed_float, "embed", out=out, table=packed.values, columns=columns, kind=kind)
        else:
            layout = packed.layout
            self._step(
                k.embed_quantized,
                "embed",
                out=out,
                table=packed.quants,
                columns=packed.columns,
                bits=layout.bits,
                bias=layout.bias,
                group=layout.group,
                scales=packed.scales,
                minimums=packed.minimums if packed.minimums is not None else int(layout.has_minimum),
                superblock=layout.superblock_bytes if layout.scale_kind == "k" else 0,
                unit=layout.unit,
            )
        return out

    def products(self, source: Source, matrices: Sequence[Matrix]) -> list[Buffer]:
        x = self._source(source)
        results = [self._multiply(x, matrix) for matrix in matrices]  # no thread waits between them
        self._wait()
        return results

    def attention(self, qkv: Sequence[Buffer], q_norm: Norm, k_norm: Norm, rope: Rope, layer: int) -> Buffer:
        q, keys, values = qkv
        heads = {"heads": q.width // self._head_dim, "kv_heads": self._num_kv_heads, "head_dim": self._head_dim}
        self.recording.rope = rope
        self.recording.heads_per_kv_head = heads["heads"] // self._num_kv_heads
        norms = {"q_norm": q_norm.weight.values, "k_norm": k_norm.weight.values, "eps": q_norm.eps}
        name = "head norm, rope, store"
        self._step(k.norm_rope_store, name, q=q, k=keys, v=values, layer=layer, **heads, **norms)
        out = Buffer(q.width)
        self._step(k.attention, "attention", q=q, out=out, layer=layer, scale=self._head_dim**-0.5, **heads)
        return out

    def gated(self, source: Source, gate: Matrix, up: Matrix, reader: Matrix) -> Buffer:
        x = self._source(source)
        both = gate.packed, up.packed
        quantized = all(isinstance(matrix, QuantizedMatrix) and matrix.rows % GROUP == 0 for matrix in both)
        if not (quantized and isinstance(reader.packed, QuantizedMatrix)):
            products = [self._multiply(x, matrix) for matrix in (gate, up)]
            self._wait()
            return self._swiglu(*products)
        self._use(gate, up)
        self._need_quantized(x)
        out = Buffer(gate.packed.rows)
        self.recording.quantized.add(out)
        groups = out.width // GROUP
        arguments = {"gate": gate.packed, "up": up.packed, "x": x, "out": out}
        chunk = max(1, min(GLU_GROUPS, groups // 8))
        self._step(k.gate_up_swiglu, "ffn_gate, ffn_up, swiglu", num_groups=groups, chunk=chunk, **arguments)
        return out

    def add_product(self, x: Buffer, source: Source, matrix: Matrix) -> Buffer:
        self._multiply(self._source(source), matrix, into=x)
        self._wait()
        return x

    def add_experts(self, x: Buffer, experts: Experts) -> Buffer:
        """Route each row, sort the rows by expert, and add what the experts compute. `moe.py` has the kernels."""
        num_experts, used = experts.gate.num_experts, experts.num_used
        self.recording.experts_per_row = used
        normed = self._source(experts.source)
        logits = self._multiply(normed, experts.router)
        self._wait()
        chosen, shares, places = (Buffer(used) for _ in range(3))
        sources, starts = Buffer(1, "num_expert_rows"), np.zeros(num_experts + 1, np.int32)
        counts = {"num_experts": num_experts, "num_used": used}
        self._step(
            k.route, "route", logits=logits, experts=chosen, shares=shares, normalize=experts.normalize, **counts
        )
        sorted_rows = {"places": places, "sources": sources, "starts": starts}
        self._step(k.sort_by_expert, "sort rows by expert", experts=chosen, **sorted_rows, **counts)
        gathered = self._gather(normed, sources, (experts.gate, experts.up))
        gate, up = (self._multiply_each(gathered, matrices, starts) for matrices in (experts.gate, experts.up))
        self._wait()
        result = self._multiply_each(self._swiglu(gate, up), experts.down, starts)
        self._wait()
        self._step(k.combine, "add experts", x=result, shares=shares, places=places, out=x, num_used=used)
        return x

    def result(self, source: Source, matrix: Matrix | None) -> None:
        x = self._source(source)
        if matrix is not None:
            x = self._multiply(x, matrix)
            self._wait()
        self.recording.output = x

    # Writing down

    def _use(self, *matrices: Matrix | ExpertMatrices) -> None:
        self.recording.matrices += [matrix for matrix in matrices if matrix not in self.recording.matrices]

    def _write(self, kernel: k.OperationKernel, name: str, **arguments: Any) -> None:
        self.recording.operations.append(Operation(kernel, arguments, self._layer, name))

    def _step(self, kernel: k.OperationKernel, name: str, **arguments: Any) -> None:
        """Write down an operation whose results the following ones read."""
        self._write(kernel, name, **arguments)
        self._wait()

    def _wait(self) -> None:
        """Note that the following operations read what was just written."""
        self.recording.operations[-1].waits = True

    def _source(self, source: Source) -> Buffer:
        """Return what a product reads, and record its computation first if it is a norm."""
        if isinstance(source, Buffer):
            return source
        out = Buffer(source.x.width, "num_logit_rows" if source.logit_rows_only else "num_rows")
        arguments = {"width": out.width, "weight": source.weight.values, "eps": source.eps}
        self._step(k.rms_norm, "rms_norm", x=source.x, out=out, logit_rows_only=source.logit_rows_only, **arguments)
        return out

    def _swiglu(self, gate: Buffer, up: Buffer) -> Buffer:
        """Record silu(gate) * up."""
        out = Buffer(gate.width, gate.count)
        self._step(k.swiglu, "swiglu", gate=gate, up=up, out=out)
        return out

    def _need_quantized(self, x: Buffer) -> None:
        """Let the operation that writes `x` quantize it too, or record an operation that does."""
        if x in self.recording.quantized:
            return
        self.recording.quantized.add(x)
        writer = next(
            operation for operation in reversed(self.recording.operations) if operation.arguments.get("out") is x
        )
        if writer.kernel not in _QUANTIZING_KERNELS or not quantizes_heads(writer):
            self._step(k.quantize, "quantize", x=x)

    def _use_in_product(self, x: Buffer, matrix: Matrix | ExpertMatrices) -> str:
        """Note that a product reads `matrix`, and `x` in the form that it takes. Returns the kind of product."""
        self._use(matrix)
        if isinstance(matrix.packed, FloatMatrix):
            return matrix.packed.kind
        self._need_quantized(x)
        return "quantized"

    def _gather(self, x: Buffer, sources: Buffer, readers: Sequence[ExpertMatrices]) -> Buffer:
        """Record copies of `x`'s rows in the order of their experts, in the forms that the readers need."""
        out = Buffer(x.width, "num_expert_rows")
        forms = {type(reader.packed) for reader in readers}
        if QuantizedMatrix in forms:
            self._need_quantized(x)
            self.recording.quantized.add(out)
        self._step(k.gather, "gather rows", sources=sources, x=x, out=out, copies_values=FloatMatrix in forms)
        return out

    def _multiply_each(self, x: Buffer, matrices: ExpertMatrices, starts: np.ndarray) -> Buffer:
        """Record the product of each expert's rows of `x` with its matrix."""
        packed, experts = matrices.packed, matrices.num_experts
        kernel = _EXPERTS[self._use_in_product(x, matrices)]
        out = Buffer(matrices.rows, x.count)
        arguments = {"num_experts": experts, "tiles_each": packed.num_tiles // experts, "starts": starts}
        self._write(kernel, matrices.name, matrix=packed, x=x, out=out, **arguments)
        return out

    def _multiply(self, x: Buffer, matrix: Matrix, into: Buffer | None = None) -> Buffer:
        """Record a product; it is added to `into` if that is a buffer."""
        packed, kernel = matrix.packed, _MATMUL[self._use_in_product(x, matrix)]
        out = into if into is not None else Buffer(packed.rows, x.count)
        chunk = max(1, min(4, packed.num_tiles // 16))
        arguments = {"num_tiles": packed.num_tiles, "chunk": chunk, "adds": into is not None}
        self._write(kernel, matrix.name, matrix=packed, x=x, out=out, **arguments)
        return out
