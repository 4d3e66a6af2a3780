"""The forward pass as a few fused steps a layer, recognised from the operations that the model calls.

`Qwen3.forward_pass` runs once, on a `Recorder` whose arrays are descriptions (a norm of the stream, a product of that).
What it calls must be what the kernels fuse, in this order; the recorder asserts it. Out comes a `Network`: the weights,
in the groups in which kernels read them. A step of a layer is then

    norm and product     RMSNorm + q, k, v          one matrix, stacked
    attention            head norm + RoPE + KV write + attention
    product and residual the output product, added to the stream
    norm, product, gate  RMSNorm + gate, up + SwiGLU  one matrix, interleaved
    product and residual the down product, added to the stream
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from forge.backends.cuda.weights import Matrix, interleaved, stacked
from forge.model.backend import Operations
from forge.model.rope import Rope


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMSNorm to be applied: its weight, float32, and epsilon."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Layer:
    """One layer's weights as the kernels read them."""

    attention_norm: Norm
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
    """The whole model."""

    embedding: Matrix
    layers: tuple[Layer, ...]
    final_norm: Norm
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def distinct(self) -> "Network":
        """The same with only the first of layers whose kernels are launched alike, and the last layer."""
        kinds = [tuple(m.kind for m in (*e.qkv, e.output, e.gate_up, e.down)) for e in self.layers]
        firsts = {kind: index for index, kind in reversed(list(enumerate(kinds[:-1])))}
        return replace(self, layers=(*(self.layers[index] for index in sorted(firsts.values())), self.layers[-1]))

    def products(self) -> list[Matrix]:
        """Every matrix that a forward multiplies with, but for the output head."""
        return [m for layer in self.layers for m in (*layer.qkv, layer.output, layer.gate_up, layer.down)]


# What an array is while it is recorded.


@dataclass(frozen=True)
class _Stream:
    """The residual stream after `adds` additions."""

    adds: int


@dataclass(frozen=True, eq=False)
class _Normed:
    x: "_Stream | _LogitRows | _Product"
    norm: Norm


@dataclass(frozen=True, eq=False)
class _Product:
    x: "_Normed | _Attended | _Gated"
    matrix: Matrix


@dataclass(frozen=True, eq=False)
class _Turned:
    heads: _Normed


@dataclass(frozen=True, eq=False)
class _Attended:
    query: _Turned
    key: _Turned
    value: _Product


@dataclass(frozen=True, eq=False)
class _Gated:
    gate: _Product
    up: _Product


@dataclass(frozen=True, eq=False)
class _LogitRows:
    x: _Stream


@dataclass
class Recorder(Operations):
    """The interface's operations, noting what is computed from what."""

    dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    _layers: list[Layer] = field(default_factory=list)
    _adds: int = 0
    _written: tuple[_Turned, _Product] | None = None
    _attention: dict = field(default_factory=dict)
    network: Network | None = None

    def embed(self, table: Matrix, batch) -> _Stream:
        self._embedding = table
        return _Stream(0)

    def rms_norm(self, x, weight: torch.Tensor, eps: float) -> _Normed:
        return _Normed(x, Norm(weight, eps))

    def linear(self, x, matrix: Matrix) -> _Product:
        return _Product(x, matrix)

    def head_norm(self, x: _Product, weight: torch.Tensor, eps: float) -> _Normed:
        return _Normed(x, Norm(weight, eps))

    def rope(self, x: _Normed, batch, rope: Rope) -> _Turned:
        assert rope.head_dim == self.head_dim
        self._rope = rope
        return _Turned(x)

    def write_kv(self, storage, layer: int, batch, keys: _Turned, values: _Product) -> None:
        assert layer == len(self._layers) and self._written is None
        self._written = keys, values

    def attention(self, q: _Turned, storage, layer: int, batch) -> _Attended:
        assert self._written is not None, "keys are written before queries attend"
        keys, values = self._written
        self._written = None
        return _Attended(q, keys, values)

    def swiglu(self, gate: _Product, up: _Product) -> _Gated:
        assert gate.x is up.x, "gate and up read the same norm"
        return _Gated(gate, up)

    def add(self, x: _Stream, y: _Product) -> _Stream:
        assert x == _Stream(self._adds), "a product is added to the stream, which goes through every layer"
        self._adds += 1
        if isinstance(y.x, _Attended):
            self._attention = self._attention_part(y.x) | {"output": y.matrix}
        else:
            assert isinstance(y.x, _Gated)
            self._layers.append(Layer(**self._attention, **self._feed_forward_part(y.x), down=y.matrix))
        return _Stream(self._adds)

    def logit_rows(self, x: _Stream, batch) -> _LogitRows:
        assert x == _Stream(self._adds)
        return _LogitRows(x)

    def to_numpy(self, x: _Product | _Normed) -> None:
        normed = x.x if isinstance(x, _Product) else x
        assert isinstance(normed, _Normed) and isinstance(normed.x, _LogitRows), (
            "the output head reads normed logit rows"
        )
        self.network = Network(
            embedding=self._embedding,
            layers=tuple(self._layers),
            final_norm=normed.norm,
            num_heads=self._num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=self._rope,
        )

    def _attention_part(self, attended: _Attended) -> dict:
        query, key, value = attended.query.heads, attended.key.heads, attended.value
        assert isinstance(query.x, _Product) and isinstance(key.x, _Product)
        products = (query.x, key.x, value)
        source = value.x
        assert isinstance(source, _Normed) and all(product.x is source for product in products)
        assert source.x == _Stream(self._adds - 1)
        self._num_heads = query.x.matrix.out_features // self.head_dim
        return {
            "attention_norm": source.norm,
            "qkv": tuple(stacked([product.matrix for product in products])),
            "query_norm": query.norm,
            "key_norm": key.norm,
        }

    def _feed_forward_part(self, gated: _Gated) -> dict:
        source = gated.gate.x
        assert isinstance(source, _Normed) and source.x == _Stream(self._adds - 1)
        return {
            "feed_forward_norm": source.norm,
            "gate_up": interleaved(gated.gate.matrix, gated.up.matrix, self.dtype),
        }


class Ending(Operations):
    """The interface's operations, noting only what a forward pass ends in."""

    def __init__(self):
        self.output_head: Matrix | None = None
        """The output head; None for a pass that ends in hidden states."""

    def linear(self, x, matrix: Matrix) -> Matrix:
        return matrix

    def to_numpy(self, x: Matrix | None) -> None:
        self.output_head = x

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return None

    embed = rms_norm = head_norm = rope = write_kv = attention = swiglu = add = logit_rows = _nothing
