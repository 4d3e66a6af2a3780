"""Recording: the model's forward pass, run once on names instead of numbers, becomes a program.

`Qwen3.forward_pass` calls the operations of the `Backend` seam one after another. Run eagerly that would be some 500
calls from Python for every token of a 0.6B model. The recorder offers the same operations, but an array in it is a
description (`Norm of x`, `Product of that with a matrix`), and an operation is written down when its result is needed.
By then it is known what follows what, so that

- a norm is quantized on the spot if a quantized product reads it, once for all products that do;
- a product that a residual is added to adds into it;
- normalizing and rotating queries and keys, and writing keys and values to the cache, is one operation.

What comes out is a table of operations over fixed buffers, which the threads walk without Python (`team.py`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from forge.backends.cpu import kernel_table as k
from forge.backends.cpu import words as w
from forge.backends.cpu.compilation import Kernel, tile_set
from forge.backends.cpu.packing import FloatMatrix, PackedMatrix, QuantizedMatrix
from forge.backends.cpu.program import (
    CONTEXT_LOGIT_ROWS,
    CONTEXT_ROWS,
    Address,
    Buffer,
    ExpertMatrices,
    Matrix,
    Operation,
    Recording,
    Vector,
)
from forge.backends.cpu.tiles import GROUP
from forge.model.backend import Operations
from forge.model.rope import Rope


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm of a buffer, written down when the first product reads it."""

    x: Buffer
    weight: "Vector"
    eps: float
    logit_rows_only: bool


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a buffer that need logits."""

    x: Buffer


@dataclass(frozen=True, eq=False)
class Product:
    """x · matrixᵀ, not yet written down."""

    x: "Norm | Gated | Buffer"
    matrix: "Matrix"


@dataclass(frozen=True, eq=False)
class Gated:
    """silu(gate) * up, written down when a product reads it."""

    gate: Product
    up: Product

    @property
    def is_quantized(self) -> bool:
        """Whether both are quantized and whole groups wide, so that one operation can do all of it."""
        packed = self.gate.matrix.packed, self.up.matrix.packed
        return all(isinstance(m, QuantizedMatrix) and m.rows % GROUP == 0 for m in packed)


@dataclass(frozen=True, eq=False)
class Head:
    """A product whose heads are to be normalized, and rotated if `rope` is there."""

    product: Product
    weight: "Vector"
    eps: float
    rope: Rope | None = None


@dataclass(frozen=True, eq=False)
class Routed:
    """The weighted sum of a row's experts, written down when it is added."""

    x: Norm
    router: Matrix
    gate: ExpertMatrices
    up: ExpertMatrices
    down: ExpertMatrices
    num_used: int
    normalize: bool


_EXPERTS_FLOAT = {"f32": k.experts_f32, "f16": k.experts_f16, "bf16": k.experts_bf16}
_MATMUL_FLOAT = {"f32": k.matmul_f32, "f16": k.matmul_f16, "bf16": k.matmul_bf16}
_KIND = {"f32": w.KIND_F32, "f16": w.KIND_F16, "bf16": w.KIND_BF16}


class Recorder(Operations):
    """The `Backend` seam's operations, writing down instead of computing. For Qwen3's order of operations."""

    def __init__(self, num_kv_heads: int, head_dim: int):
        self.recording = Recording()
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._layer = -1
        self._written: dict[Norm, Buffer] = {}
        self._pending_kv: tuple[Head, Product] | None = None

    # The seam

    def begin_layer(self, index: int) -> None:
        self._layer = index

    def embed(self, table: Matrix, batch) -> Buffer:
        self._use(table)
        packed = table.packed
        out = self._buffer(packed.columns)
        words = {w.EMBED_OUT: Address(out), w.EMBED_STRIDE: out.stride}
        if isinstance(packed, FloatMatrix):
            words |= {
                w.EMBED_TABLE: packed.values,
                w.EMBED_COLUMNS: packed.values.shape[1],
                w.EMBED_KIND: _KIND[packed.kind],
            }
            self._write(k.embed_float, words, "embed")
        else:
            layout = packed.layout
            words |= {
                w.EMBED_TABLE: packed.quants,
                w.EMBED_SCALES: packed.scales,
                w.EMBED_MINIMUMS: packed.minimums if packed.minimums is not None else int(layout.has_minimum),
                w.EMBED_COLUMNS: packed.columns,
                w.EMBED_BITS: layout.bits,
                w.EMBED_BIAS: layout.bias,
                w.EMBED_GROUP: layout.group,
                w.EMBED_SUPERBLOCK: layout.superblock_bytes if layout.scale_kind == "k" else 0,
                w.EMBED_UNIT: np.float32(layout.unit),
            }
            self._write(k.embed_quantized, words, "embed")
        self._wait()
        return out

    def rms_norm(self, x: Buffer | Rows, weight: Vector, eps: float) -> Norm:
        if isinstance(x, Rows):
            return Norm(x.x, weight, eps, logit_rows_only=True)
        return Norm(x, weight, eps, logit_rows_only=False)

    def linear(self, x: Norm | Gated | Buffer, matrix: Matrix) -> Product:
        self._use(matrix)
        return Product(x, matrix)

    def head_norm(self, x: Product, weight: Vector, eps: float) -> Head:
        return Head(x, weight, eps)

    def rope(self, x: Head, batch, rope: Rope) -> Head:
        return Head(x.product, x.weight, x.eps, rope)

    def write_kv(self, storage, layer: int, batch, keys: Head, values: Product) -> None:
        self._pending_kv = (keys, values)

    def attention(self, q: Head, storage, layer: int, batch) -> Buffer:
        assert self._pending_kv is not None and q.rope is not None, "keys are written and queries rotated before"
        keys, values = self._pending_kv
        self._pending_kv = None
        head_dim = self._head_dim
        heads, kv_heads = q.product.matrix.packed.rows // head_dim, self._num_kv_heads
        self.recording.rope = q.rope
        self.recording.heads_per_kv_head = heads // kv_heads
        # All three products read the same norm, so no thread waits between them.
        q_out, k_out, v_out = (self._multiply(product) for product in (q.product, keys.product, values))
        self._wait()
        self._use_vectors(q.weight, keys.weight)
        self._write(
            k.norm_rope_store,
            {
                w.QKV_Q: Address(q_out),
                w.QKV_K: Address(k_out),
                w.QKV_V: Address(v_out),
                w.QKV_Q_STRIDE: q_out.stride,
                w.QKV_KV_STRIDE: k_out.stride,
                w.QKV_HEADS: heads,
                w.QKV_KV_HEADS: kv_heads,
                w.QKV_HEAD_DIM: head_dim,
                w.QKV_Q_NORM: q.weight.values,
                w.QKV_K_NORM: keys.weight.values,
                w.QKV_EPS: np.float32(q.eps),
                w.QKV_LAYER: layer,
            },
            "head norm, rope, store",
        )
        self._wait()
        out = self._buffer(heads * head_dim)
        self._write(
            k.attention,
            {
                w.ATT_Q: Address(q_out),
                w.ATT_Q_STRIDE: q_out.stride,
                w.ATT_OUT: Address(out),
                w.ATT_HEADS: heads,
                w.ATT_KV_HEADS: kv_heads,
                w.ATT_HEAD_DIM: head_dim,
                w.ATT_LAYER: layer,
                w.ATT_SCALE: np.float32(head_dim**-0.5),
            },
            "attention",
        )
        self._wait()
        return out

    def swiglu(self, gate: Product, up: Product) -> Gated:
        return Gated(gate, up)

    def experts(self, x: Norm, router: Matrix, gate, up, down, num_used: int, normalize: bool) -> Routed:
        for matrix in (router, gate, up, down):
            self._use(matrix)
        return Routed(x, router, gate, up, down, num_used, normalize)

    def add(self, x: Buffer, y: Product | Routed) -> Buffer:
        if isinstance(y, Routed):
            self._route(y, into=x)
        else:
            self._multiply(y, into=x)
        self._wait()
        return x

    def logit_rows(self, x: Buffer, batch) -> Rows:
        return Rows(x)

    def to_numpy(self, x: Product | Norm) -> None:
        if isinstance(x, Norm):
            self.recording.output = self._normed(x)
        else:
            self.recording.output = self._multiply(x)
            self._wait()

    # Writing down

    def _buffer(self, width: int, rows_word: int = CONTEXT_ROWS) -> Buffer:
        buffer = Buffer(width, rows_word)
        self.recording.buffers.append(buffer)
        return buffer

    def _use(self, matrix: Matrix) -> None:
        if matrix not in self.recording.matrices:
            self.recording.matrices.append(matrix)

    def _use_vectors(self, *vectors: Vector) -> None:
        self.recording.vectors += vectors

    def _write(self, kernel: Kernel, words: dict[int, Any], name: str) -> Operation:
        operation = Operation(kernel, words, self._layer, name)
        self.recording.operations.append(operation)
        return operation

    def _wait(self) -> None:
        """What follows reads what was just written."""
        self.recording.operations[-1].wait = True

    def _normed(self, norm: Norm) -> Buffer:
        """The norm's result, written down at its first use."""
        if norm not in self._written:
            rows_word = CONTEXT_LOGIT_ROWS if norm.logit_rows_only else CONTEXT_ROWS
            out = self._buffer(norm.x.width, rows_word)
            self._use_vectors(norm.weight)
            self._write(
                k.rms_norm,
                {
                    w.ROWS_WORD: rows_word,
                    w.NORM_IN: Address(norm.x),
                    w.NORM_STRIDE: out.stride,
                    w.NORM_WIDTH: out.width,
                    w.NORM_WEIGHT: norm.weight.values,
                    w.NORM_EPS: np.float32(norm.eps),
                    w.NORM_OUT: Address(out),
                    w.NORM_ROW_NUMBERS: w.CTX_LOGIT_ROW_NUMBERS if norm.logit_rows_only else 0,
                },
                "rms_norm",
            )
            self._wait()
            self._written[norm] = out
        return self._written[norm]

    def _input(self, x: Norm | Gated | Buffer, quantized: bool) -> Buffer:
        """What a product reads, written down if it is not yet."""
        if isinstance(x, Norm):
            return self._normed(x)
        if isinstance(x, Gated):
            return self._gated_quantized(x) if quantized and x.is_quantized else self._gated(x)
        return x

    def _gated_quantized(self, gated: Gated) -> Buffer:
        """Both products, the gate and its quantization as one operation."""
        x = self._input(gated.gate.x, quantized=True)
        self._need_quantized(x)
        packed, up_packed = gated.gate.matrix.packed, gated.up.matrix.packed
        assert isinstance(packed, QuantizedMatrix) and isinstance(up_packed, QuantizedMatrix)
        out = self._buffer(packed.rows)
        self.recording.quantized.add(out)
        words = {
            w.FFN_X: Address(x, "quants"),
            w.FFN_X_SCALES: Address(x, "scales"),
            w.FFN_X_SUMS: Address(x, "sums"),
            w.FFN_X_STRIDE: x.stride,
            w.FFN_GROUPS: packed.num_groups,
            w.FFN_PAIRS: packed.rows // GROUP,
            w.FFN_CHUNK: max(1, min(2, packed.rows // GROUP // 8)),
            w.FFN_OUT_STRIDE: out.stride,
            w.FFN_QUANTS: Address(out, "quants"),
            w.FFN_SCALES: Address(out, "scales"),
            w.FFN_SUMS: Address(out, "sums"),
        }
        for first, matrix in ((w.FFN_GATE, packed), (w.FFN_UP, up_packed)):
            words |= {
                first + w.PAIR_TILES: tile_set(matrix.layout).addresses,
                first + w.PAIR_WEIGHTS: matrix.quants,
                first + w.PAIR_SCALES: matrix.scales,
                first + w.PAIR_MINIMUMS: matrix.minimums,
                first + w.PAIR_TILE_BYTES: matrix.quants[0].nbytes,
                first + w.PAIR_SCALE_BYTES: matrix.scales[0].nbytes,
            }
        self._write(k.gate_up_swiglu, words, "ffn_gate, ffn_up, swiglu")
        self._wait()
        return out

    def _gated(self, gated: Gated) -> Buffer:
        """Two products and an operation for what comes after them."""
        gate_out, up_out = self._multiply(gated.gate), self._multiply(gated.up)
        self._wait()
        return self._silu_times(gate_out, up_out)

    def _silu_times(self, gate_out: Buffer, up_out: Buffer) -> Buffer:
        """silu(gate) * up."""
        out = self._buffer(gate_out.width, gate_out.rows_word)
        words = {
            w.ROWS_WORD: out.rows_word,
            w.GLU_GATE: Address(gate_out),
            w.GLU_UP: Address(up_out),
            w.GLU_STRIDE: out.stride,
            w.GLU_WIDTH: out.width,
            w.GLU_OUT: Address(out),
        }
        self._write(k.swiglu, words, "swiglu")
        self._wait()
        return out

    def _route(self, routed: Routed, into: Buffer) -> None:
        """Choose experts, group the rows by them, and add what comes of it. `experts.py` has the kernels."""
        used, experts = routed.num_used, routed.gate.num_experts
        self.recording.experts_per_row = used
        logits = self._multiply(Product(routed.x, routed.router))
        self._wait()
        chosen, weights, places = (self._buffer(used) for _ in range(3))
        rows = self._buffer(1, w.CTX_EXPERT_ROWS)
        starts = np.zeros(experts + 1, np.int32)
        order = {w.MOE_EXPERTS: experts, w.MOE_USED: used, w.MOE_STRIDE: chosen.stride, w.MOE_CHOSEN: Address(chosen)}
        choice = order | {w.MOE_IN: Address(logits), w.MOE_IN_STRIDE: logits.stride, w.MOE_WEIGHTS: Address(weights)}
        self._write(k.choose, choice | {w.MOE_NORMALIZE: int(routed.normalize)}, "choose experts")
        self._wait()
        rows_words = {w.MOE_ROWS: Address(rows), w.MOE_ROWS_STRIDE: rows.stride}
        order |= {w.MOE_STARTS: starts, w.MOE_PLACES: Address(places)}
        self._write(k.group, order | rows_words, "group rows by expert")
        self._wait()
        x = self._gathered(self._normed(routed.x), routed, rows_words)
        gate, up = (self._each_expert(x, matrices, starts) for matrices in (routed.gate, routed.up))
        self._wait()
        result = self._each_expert(self._silu_times(gate, up), routed.down, starts)
        self._wait()
        sums = {w.MOE_USED: used, w.MOE_STRIDE: chosen.stride, w.MOE_WEIGHTS: Address(weights)}
        sums |= {w.MOE_PLACES: Address(places), w.MOE_IN: Address(result), w.MOE_IN_STRIDE: result.stride}
        self._write(k.combine, sums | {w.MOE_OUT: Address(into)}, "add experts")

    def _gathered(self, x: Buffer, routed: Routed, rows_words: dict[int, object]) -> Buffer:
        """Copies of `x`'s rows in the order of their experts, in the form that gate and up read."""
        out = self._buffer(x.width, w.CTX_EXPERT_ROWS)
        kinds = {isinstance(matrices.packed, QuantizedMatrix) for matrices in (routed.gate, routed.up)}
        words = rows_words | {w.MOE_IN_STRIDE: x.stride}
        if False in kinds:
            self._write(k.gather, words | {w.MOE_IN: Address(x), w.MOE_OUT: Address(out)}, "gather rows")
            self._wait()
        if True in kinds:
            self._need_quantized(x)
            self.recording.quantized.add(out)
            for number, part in enumerate(("quants", "scales", "sums")):
                words |= {w.MOE_QUANTS + number: Address(x, part), w.MOE_OUT_QUANTS + number: Address(out, part)}
            self._write(k.gather, words, "gather rows")
            self._wait()
        return out

    def _each_expert(self, x: Buffer, matrices: ExpertMatrices, starts: np.ndarray) -> Buffer:
        """The product of each expert's rows of `x` with its matrix."""
        packed = matrices.packed
        out = self._buffer(matrices.rows, x.rows_word)
        words = {
            w.MM_OUT: Address(out),
            w.MM_OUT_STRIDE: out.stride,
            w.MM_X_STRIDE: x.stride,
            w.MOE_EXPERTS: matrices.num_experts,
            w.MOE_TILES_EACH: packed.num_tiles // matrices.num_experts,
            w.MOE_STARTS: starts,
        } | self._weight_words(x, packed)
        kernel = _EXPERTS_FLOAT[packed.kind] if isinstance(packed, FloatMatrix) else k.experts_quantized
        self._write(kernel, words, matrices.name)
        return out

    def _need_quantized(self, x: Buffer) -> None:
        """Have the operation that writes `x` quantize it too, or one of its own do it."""
        if x in self.recording.quantized:
            return
        self.recording.quantized.add(x)
        parts = {name: Address(x, name) for name in ("quants", "scales", "sums")}
        writer = next(
            o
            for o in reversed(self.recording.operations)
            if any(isinstance(word, Address) and word.owner is x for word in o.words.values())
        )
        if writer.kernel is k.rms_norm:
            writer.words |= {w.NORM_QUANTS: parts["quants"], w.NORM_SCALES: parts["scales"], w.NORM_SUMS: parts["sums"]}
        elif writer.kernel is k.swiglu:
            writer.words |= {w.GLU_QUANTS: parts["quants"], w.GLU_SCALES: parts["scales"], w.GLU_SUMS: parts["sums"]}
        else:
            self._write(
                k.quantize,
                {
                    w.ROWS_WORD: x.rows_word,
                    w.QUANT_IN: Address(x),
                    w.QUANT_STRIDE: x.stride,
                    w.QUANT_WIDTH: x.width,
                    w.QUANT_QUANTS: parts["quants"],
                    w.QUANT_SCALES: parts["scales"],
                    w.QUANT_SUMS: parts["sums"],
                },
                "quantize",
            )
            self._wait()

    def _multiply(self, product: Product, into: Buffer | None = None) -> Buffer:
        """Write down a product; `into` is a buffer that it is added to."""
        packed = product.matrix.packed
        x = self._input(product.x, quantized=isinstance(packed, QuantizedMatrix))
        out = into if into is not None else self._buffer(packed.rows, x.rows_word)
        words = {
            w.ROWS_WORD: x.rows_word,
            w.MM_OUT: Address(out),
            w.MM_OUT_STRIDE: out.stride,
            w.MM_X_STRIDE: x.stride,
            w.MM_NUM_TILES: packed.num_tiles,
            w.MM_ADD: int(into is not None),
            w.MM_CHUNK: max(1, min(4, packed.num_tiles // 16)),
        }
        words |= self._weight_words(x, packed)
        kernel = _MATMUL_FLOAT[packed.kind] if isinstance(packed, FloatMatrix) else k.matmul_quantized
        self._write(kernel, words, product.matrix.name)
        return out

    def _weight_words(self, x: Buffer, packed: PackedMatrix) -> dict[int, object]:
        """Where a product finds its weights and its input, which is quantized if they are."""
        if isinstance(packed, FloatMatrix):
            return {w.MM_WEIGHTS: packed.values, w.MM_X: Address(x), w.MM_TILE_BYTES: packed.values[0].nbytes}
        self._need_quantized(x)
        return {
            w.MM_TILES: tile_set(packed.layout).addresses,
            w.MM_WEIGHTS: packed.quants,
            w.MM_SCALES: packed.scales,
            w.MM_MINIMUMS: packed.minimums,
            w.MM_X: Address(x, "quants"),
            w.MM_X_SCALES: Address(x, "scales"),
            w.MM_X_SUMS: Address(x, "sums"),
            w.MM_GROUPS: packed.num_groups,
            w.MM_TILE_BYTES: packed.quants[0].nbytes,
            w.MM_TILE_SCALE_BYTES: packed.scales[0].nbytes,
        }
