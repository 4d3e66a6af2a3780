"""Which operations of a forward pass are computed together: found once, for every backend that fuses.

`Qwen3.forward_pass` names small operations, one after another, as they are explained. A fast backend computes several
of them at once, because what lies between them need not go through memory. `Fusion` offers the model the small
operations and calls a backend's fused ones, five per layer:

    products     RMSNorm, and the products that read it: queries, keys and values
    attention    head norms, rotation, writing keys and values, attention
    add_product  the output product, added to the residual stream
    gated        RMSNorm, the gate's and the up product, SwiGLU
    add_product  the down product, added

Between the calls arrays are the backend's own; what is not computed yet is a description (`Norm`, …).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forge.errors import UsageError
from forge.model.backend import NO_EXPERTS, Array, Batch, Operations, Storage
from forge.model.rope import Rope


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm of `x`, or of its rows that need logits."""

    x: Array
    weight: Array
    eps: float
    logit_rows_only: bool = False


@dataclass(frozen=True, eq=False)
class Experts:
    """A routed feed-forward: what it reads, its weights, and how many experts a row uses."""

    source: Norm
    router: Array
    gate: Array
    up: Array
    down: Array
    num_used: int
    normalize: bool


Source = Norm | Array
"""Type of what a product reads."""


class FusedOperations(ABC):
    """The steps of a forward pass as a backend computes them."""

    def begin_layer(self, index: int) -> None:  # noqa: B027 (optional)
        """Begin a layer, as in `Operations`."""

    @abstractmethod
    def embed(self, table: Array) -> Array:
        """Return the embeddings of the batch's tokens: `[T, hidden]`, the residual stream."""

    @abstractmethod
    def products(self, source: Source, matrices: Sequence[Array]) -> Sequence[Array]:
        """Return the products of one source with several matrices."""

    @abstractmethod
    def attention(self, qkv: Sequence[Array], q_norm: Norm, k_norm: Norm, rope: Rope, layer: int) -> Array:
        """Normalize and rotate the heads of queries and keys, store keys and values, attend. The norms' `x` are two of
        `qkv`."""

    @abstractmethod
    def gated(self, source: Source, gate: Array, up: Array, reader: Array) -> Array:
        """Return silu(source · gateᵀ) * (source · upᵀ), for a product with the matrix `reader`."""

    @abstractmethod
    def add_product(self, x: Array, source: Source, matrix: Array) -> Array:
        """Return x + source · matrixᵀ."""

    def add_experts(self, x: Array, experts: Experts) -> Array:
        """Return x + the weighted sum of each row's experts."""
        raise UsageError(NO_EXPERTS)

    @abstractmethod
    def result(self, source: Source, matrix: Array | None) -> None:
        """End the pass in `source` times that matrix, or in `source` if there is none."""


@dataclass(frozen=True, eq=False)
class _LogitRows:
    x: Array


@dataclass(frozen=True, eq=False)
class _Product:
    source: "Source | _Gated"
    matrix: Array


@dataclass(frozen=True, eq=False)
class _Heads:
    """A product whose heads are normalized, and rotated if it has a `rope`."""

    product: _Product
    weight: Array
    eps: float
    rope: Rope | None = None


@dataclass(frozen=True, eq=False)
class _Gated:
    source: Source
    gate: Array
    up: Array


class Fusion(Operations):
    """Translates a forward pass's operations into fused ones. It runs a pass once, without a batch or a storage."""

    def __init__(self, fused: FusedOperations):
        self._fused = fused
        self._stored: tuple[_Heads, _Product] | None = None
        """Keys and values that were written and not yet attended to."""

    def begin_layer(self, index: int) -> None:
        self._fused.begin_layer(index)

    def embed(self, table: Array, batch: Batch) -> Array:
        return self._fused.embed(table)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Norm:
        if isinstance(x, _LogitRows):
            return Norm(x.x, weight, eps, logit_rows_only=True)
        return Norm(x, weight, eps)

    def linear(self, x: Array, matrix: Array) -> _Product:
        return _Product(x, matrix)

    def head_norm(self, x: _Product, weight: Array, eps: float) -> _Heads:
        return _Heads(x, weight, eps)

    def rope(self, x: _Heads, batch: Batch, rope: Rope) -> _Heads:
        return replace(x, rope=rope)

    def write_kv(self, storage: Storage, layer: int, batch: Batch, keys: _Heads, values: _Product) -> None:
        self._stored = keys, values

    def attention(self, q: _Heads, storage: Storage, layer: int, batch: Batch) -> Array:
        assert self._stored is not None and q.rope is not None, "keys are written and queries rotated before"
        (k, v), self._stored = self._stored, None
        assert q.rope == k.rope, "queries and keys rotate alike"
        products = q.product, k.product, v
        source = v.source
        assert all(product.source is source for product in products), "queries, keys and values read the same norm"
        qkv = self._fused.products(source, [product.matrix for product in products])
        q_norm, k_norm = Norm(qkv[0], q.weight, q.eps), Norm(qkv[1], k.weight, k.eps)
        return self._fused.attention(qkv, q_norm, k_norm, q.rope, layer)

    def swiglu(self, gate: _Product, up: _Product) -> _Gated:
        assert gate.source is up.source, "gate and up read the same norm"
        return _Gated(gate.source, gate.matrix, up.matrix)

    def experts(
        self, x: Norm, router: Array, gate: Array, up: Array, down: Array, num_used: int, normalize: bool
    ) -> Experts:
        return Experts(x, router, gate, up, down, num_used, normalize)

    def add(self, x: Array, y: _Product | Experts) -> Array:
        if isinstance(y, Experts):
            return self._fused.add_experts(x, y)
        return self._fused.add_product(x, self._source(y), y.matrix)

    def logit_rows(self, x: Array, batch: Batch) -> _LogitRows:
        return _LogitRows(x)

    def result(self, x: _Product | Norm) -> None:
        if isinstance(x, _Product):
            self._fused.result(self._source(x), x.matrix)
        else:
            self._fused.result(x, None)

    def _source(self, product: _Product) -> Source:
        """Return what a product reads, and compute it first if it is the gate of a feed-forward."""
        source = product.source
        if isinstance(source, _Gated):
            return self._fused.gated(source.source, source.gate, source.up, product.matrix)
        return source
