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

from forge.backends.backend import Operations
from forge.backends.cpu import kernel_table as k
from forge.backends.cpu import words as w
from forge.backends.cpu.compilation import Kernel, tile_set
from forge.backends.cpu.packing import FloatMatrix, QuantizedMatrix
from forge.backends.cpu.program import (
    CONTEXT_LOGIT_ROWS,
    CONTEXT_ROWS,
    Address,
    Buffer,
    Matrix,
    Operation,
    Recording,
    Vector,
)
from forge.backends.cpu.tiles import GROUP


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
    """A product whose heads are to be normalized, and rotated if `theta` is there."""

    product: Product
    weight: "Vector"
    eps: float
    theta: float | None = None
    head_dim: int = 0


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

    def rope(self, x: Head, batch, head_dim: int, theta: float) -> Head:
        return Head(x.product, x.weight, x.eps, theta, head_dim)

    def write_kv(self, storage, layer: int, batch, keys: Head, values: Product) -> None:
        self._pending_kv = (keys, values)

    def attention(self, q: Head, storage, layer: int, batch) -> Buffer:
        assert self._pending_kv is not None and q.theta is not None, "keys are written and queries rotated before"
        keys, values = self._pending_kv
        self._pending_kv = None
        head_dim = self._head_dim
        heads, kv_heads = q.product.matrix.packed.rows // head_dim, self._num_kv_heads
        self.recording.head_dim, self.recording.theta = head_dim, q.theta
        self.recording.heads_per_kv_head = heads // kv_heads
        # All three products read the same norm, so nobody waits between them.
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

    def add(self, x: Buffer, y: Product) -> Buffer:
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
        out = self._buffer(gate_out.width)
        words = {
            w.GLU_GATE: Address(gate_out),
            w.GLU_UP: Address(up_out),
            w.GLU_STRIDE: out.stride,
            w.GLU_WIDTH: out.width,
            w.GLU_OUT: Address(out),
        }
        self._write(k.swiglu, words, "swiglu")
        self._wait()
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
        name = product.matrix.name
        if isinstance(packed, FloatMatrix):
            words |= {w.MM_WEIGHTS: packed.values, w.MM_X: Address(x), w.MM_TILE_BYTES: packed.values[0].nbytes}
            self._write(_MATMUL_FLOAT[packed.kind], words, name)
            return out
        self._need_quantized(x)
        words |= {
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
        self._write(k.matmul_quantized, words, name)
        return out
