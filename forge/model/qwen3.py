"""Qwen3's forward pass, once, for every backend, cache kind and batch.

The shape of the network (Qwen3 technical report, 2025) in one breath: token embeddings; in each layer RMSNorm,
grouped-query attention with a norm on every query and key head and rotary positions, a residual, RMSNorm, a SwiGLU
feed-forward, a residual; a last RMSNorm and the output head, which is the embedding matrix again where the file ties
the two.

There is one function for prefill and decode. What differs is how many rows a sequence brings, and where they start.
A mixture of experts has another feed-forward (`forge.model.qwen3_moe`).
"""

from dataclasses import dataclass

import numpy as np

from forge.cache.kv_storage import KvLayout, KvStorage
from forge.model.backend import Array, Backend, Operations
from forge.model.config import Qwen3Config
from forge.model.forward_batch import ForwardBatch
from forge.model.model import Logits, Model
from forge.model.operation_time import OperationTime


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer's attention and norms in the backend's layout, by the names that the tensors have in
    their source between `blk.N.` and `.weight`. Matrices are `[out, in]`."""

    attn_norm: Array  # [hidden]
    attn_q: Array  # [heads * head_dim, hidden]
    attn_k: Array  # [kv_heads * head_dim, hidden]
    attn_v: Array  # [kv_heads * head_dim, hidden]
    attn_q_norm: Array  # [head_dim]
    attn_k_norm: Array  # [head_dim]
    attn_output: Array  # [hidden, heads * head_dim]
    ffn_norm: Array  # [hidden]


@dataclass(frozen=True)
class DenseLayerWeights(LayerWeights):
    """A layer with one feed-forward."""

    ffn_gate: Array  # [ffn, hidden]
    ffn_up: Array  # [ffn, hidden]
    ffn_down: Array  # [hidden, ffn]


@dataclass(frozen=True)
class Qwen3Weights:
    """All weights of a model, as arrays of its backend."""

    embedding: Array  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    output_norm: Array  # [hidden]
    head: Array | None  # [vocab, hidden], the embedding itself where tied; [labels, hidden]; None of embedding models


class Qwen3(Model):
    """The model: hyper-parameters, weights and the backend that they were loaded for."""

    embeds = True

    def __init__(self, config: Qwen3Config, weights: Qwen3Weights, backend: Backend):
        self.config = config
        self.weights = weights
        self.backend = backend
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self.max_position_embeddings = config.max_position_embeddings
        self.generates, self.labels = config.generates, config.labels
        self.runs_ahead = backend.runs_ahead

    def kv_layout(self, num_blocks: int, block_size: int, kv_dtype: str = "float32") -> KvLayout:
        """Return the layout of a storage that fits this model."""
        config = self.config
        return KvLayout(
            config.num_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim, kv_dtype
        )

    def new_storage(self, layout: KvLayout) -> KvStorage:
        return self.backend.new_storage(layout)

    def prepare(self, layout: KvLayout) -> None:
        self.backend.prepare(self.hidden_pass if self.weights.head is None else self.forward_pass, layout)

    def time_operations(self) -> None:
        self.backend.time_operations()

    def operation_times(self) -> tuple[OperationTime, ...]:
        return self.backend.operation_times()

    def forward(self, batch: ForwardBatch, storage: KvStorage) -> Logits:
        """Run one pass over all rows of `batch`; return logits, float32 `[R, vocab_size]`, for `batch.logit_rows` in
        that order.

        Keys and values of every row are written to `storage` first and attention reads them back from there, in every
        layer, so that a row sees the same rounded keys whether they were computed now or a thousand steps ago.
        """
        return self.backend.run(self.forward_pass, batch, storage)

    def hidden(self, batch: ForwardBatch, storage: KvStorage) -> np.ndarray:
        """Run the same pass without the output head; return the last norm's result for `logit_rows`: float32 `[R,
        hidden]`."""
        return np.asarray(self.backend.run(self.hidden_pass, batch, storage))

    def forward_pass(self, ops: Operations, batch: ForwardBatch, storage: KvStorage) -> Array:
        """Call the operations of one pass, in order. `backend.run` calls this: each time, or once to record them."""
        return ops.result(ops.linear(self.run_layers(ops, batch, storage), self.weights.head))

    def hidden_pass(self, ops: Operations, batch: ForwardBatch, storage: KvStorage) -> Array:
        """Run `forward_pass` up to what the output head would read."""
        return ops.result(self.run_layers(ops, batch, storage))

    def temporary_bytes(self, num_rows: int, num_logit_rows: int) -> int:
        """Estimate how many bytes of arrays a pass needs beside weights and storage."""
        config = self.config
        heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        feed_forward = 2 * config.intermediate_size
        if config.num_experts:
            feed_forward = config.num_experts_per_tok * (2 * config.hidden_size + 3 * config.intermediate_size)
        per_row = 4 * (2 * config.hidden_size + 2 * heads + feed_forward)
        return num_rows * per_row + 4 * num_logit_rows * config.vocab_size

    def run_layers(self, ops: Operations, batch: ForwardBatch, storage: KvStorage) -> Array:
        """Compute all layers and the last norm: `[R, hidden]`, the input of the output head."""
        config, weights = self.config, self.weights
        ops.begin_layer(-1)  # outside the layers, for what times operations
        x = ops.embed(weights.embedding, batch)
        for index, layer in enumerate(weights.layers):
            ops.begin_layer(index)
            x = ops.add(x, self._attention(ops, index, layer, x, batch, storage))
            x = ops.add(x, self._feed_forward(ops, layer, x))
        ops.begin_layer(-1)
        x = ops.logit_rows(x, batch)  # only rows whose logits are wanted pay for the head
        return ops.rms_norm(x, weights.output_norm, config.rms_norm_eps)

    def _attention(
        self, ops: Operations, index: int, layer: LayerWeights, x: Array, batch: ForwardBatch, storage: KvStorage
    ) -> Array:
        config = self.config
        x = ops.rms_norm(x, layer.attn_norm, config.rms_norm_eps)
        q = ops.head_norm(ops.linear(x, layer.attn_q), layer.attn_q_norm, config.rms_norm_eps)
        k = ops.head_norm(ops.linear(x, layer.attn_k), layer.attn_k_norm, config.rms_norm_eps)
        v = ops.linear(x, layer.attn_v)  # q is [T, heads * head_dim]; k and v are [T, kv_heads * head_dim]
        q, k = ops.rope(q, batch, config.rope), ops.rope(k, batch, config.rope)
        ops.write_kv(storage, index, batch, k, v)
        return ops.linear(ops.attention(q, storage, index, batch), layer.attn_output)

    def _feed_forward(self, ops: Operations, layer: LayerWeights, x: Array) -> Array:
        assert isinstance(layer, DenseLayerWeights)
        x = ops.rms_norm(x, layer.ffn_norm, self.config.rms_norm_eps)
        return ops.linear(ops.swiglu(ops.linear(x, layer.ffn_gate), ops.linear(x, layer.ffn_up)), layer.ffn_down)
