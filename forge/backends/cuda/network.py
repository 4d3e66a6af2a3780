"""The forward pass as a few fused steps a layer, recognised from the operations that the model calls.

`forge.backends.fusion` finds which operations belong together; the `Recorder` notes their weights, in the groups in
which kernels read them, and asserts that the stream goes through every layer. Out comes a `Network`. A step of a layer
is then

    norm and product     RMSNorm + q, k, v          one matrix, stacked
    attention            head norm + RoPE + KV write + attention
    product and residual the output product, added to the stream
    norm, product, gate  RMSNorm + gate, up + SwiGLU  one matrix, interleaved
    product and residual the down product, added to the stream
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from forge.backends.cuda.weights import Matrix, interleaved, stacked
from forge.backends.fusion import FusedOperations, Norm, Source
from forge.model.backend import Operations
from forge.model.rope import Rope


@dataclass(frozen=True)
class Layer:
    """One layer's weights as the kernels read them."""

    attention_norm: Norm
    """An RMSNorm still to be applied: its weight, float32, and epsilon."""
    qkv: tuple[Matrix, ...]
    """Queries, keys and values under each other: one matrix, or a few where the file's types differ."""
    query_norm: Norm
    key_norm: Norm
    output: Matrix
    feed_forward_norm: Norm
    gate_up: Matrix
    """`[2 * ffn, hidden]`: a row of gate, a row of up, in turn."""
    down: Matrix


@dataclass(frozen=True)
class Network:
    """The whole model's weights as the kernels read them."""

    embedding: Matrix
    layers: tuple[Layer, ...]
    final_norm: Norm
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope

    def distinct(self) -> "Network":
        """Keep the last layer, and of layers whose kernels are launched alike only the first."""
        kinds = [tuple(m.kind for m in (*e.qkv, e.output, e.gate_up, e.down)) for e in self.layers]
        firsts = {kind: index for index, kind in reversed(list(enumerate(kinds[:-1])))}
        return replace(self, layers=(*(self.layers[index] for index in sorted(firsts.values())), self.layers[-1]))

    def products(self) -> list[Matrix]:
        """List every matrix that a forward multiplies with, except the output head."""
        return [m for layer in self.layers for m in (*layer.qkv, layer.output, layer.gate_up, layer.down)]


_STREAM, _ATTENDED, _GATED = "residual stream", "attention's result", "SwiGLU's result"
"""Stand-ins for arrays while a pass is recorded."""


class Recorder(FusedOperations):
    """Notes the weights of the fused operations."""

    def __init__(self, dtype: torch.dtype, num_kv_heads: int, head_dim: int):
        self._dtype, self._num_kv_heads, self._head_dim = dtype, num_kv_heads, head_dim
        self._layers: list[Layer] = []
        self._layer: dict[str, Any] = {}
        """The parts of the layer under way."""
        self.network: Network | None = None

    def embed(self, table: Matrix) -> str:
        self._embedding = table
        return _STREAM

    def products(self, source: Source, matrices: Sequence[Matrix]) -> Sequence[str]:
        self._num_heads = matrices[0].out_features // self._head_dim
        self._layer = {"attention_norm": _norm(source), "qkv": tuple(stacked(matrices))}
        return [matrix.name for matrix in matrices]

    def attention(self, qkv: Sequence[str], q_norm: Norm, k_norm: Norm, rope: Rope, layer: int) -> str:
        assert layer == len(self._layers) and rope.head_dim == self._head_dim
        self._rope = rope
        self._layer |= {"query_norm": q_norm, "key_norm": k_norm}
        return _ATTENDED

    def gated(self, source: Source, gate: Matrix, up: Matrix, reader: Matrix) -> str:
        self._layer |= {"feed_forward_norm": _norm(source), "gate_up": interleaved(gate, up, self._dtype)}
        return _GATED

    def add_product(self, x: str, source: Source, matrix: Matrix) -> str:
        assert x == _STREAM, "products are added to the residual stream"
        if source == _ATTENDED:
            self._layer["output"] = matrix
        else:
            assert source == _GATED
            self._layers.append(Layer(**self._layer, down=matrix))
        return _STREAM

    def result(self, source: Source, matrix: Matrix | None) -> None:
        self.network = Network(
            embedding=self._embedding,
            layers=tuple(self._layers),
            final_norm=_norm(source),
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            rope=self._rope,
        )


def _norm(source: Source) -> Norm:
    assert isinstance(source, Norm) and source.x == _STREAM, "a product reads a norm of the residual stream"
    return source


class Ending(Operations):
    """Implements the operations and notes only what a forward pass ends in."""

    def __init__(self):
        self.output_head: Matrix | None = None
        """The output head; None for a pass that ends in hidden states."""

    def linear(self, x, matrix: Matrix) -> Matrix:
        return matrix

    def result(self, x: Matrix | None) -> None:
        self.output_head = x

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return None

    embed = rms_norm = head_norm = rope = write_kv = attention = swiglu = add = logit_rows = _nothing
