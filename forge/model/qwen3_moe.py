"""A mixture of experts: Qwen3's forward pass with a routed feed-forward.

Each layer has many small feed-forwards, and a router that chooses some of them for each row. A row reads the weights of
its own experts only: of Qwen3-30B-A3B's 128 experts 8, 3 of 30 thousand million weights. A batch of rows reads the
experts that any of them chose, so what a row costs in bytes falls with the batch far more slowly than in a dense model.
"""

from dataclasses import dataclass

from forge.model.backend import Array, Operations
from forge.model.qwen3 import LayerWeights, Qwen3


@dataclass(frozen=True)
class MoeLayerWeights(LayerWeights):
    """A layer with a router and the feed-forwards of all experts: `[experts, out, in]`."""

    ffn_gate_inp: Array  # [experts, hidden]
    ffn_gate_exps: Array
    ffn_up_exps: Array
    ffn_down_exps: Array


class Qwen3Moe(Qwen3):
    """A model whose layers are `MoeLayerWeights`."""

    def _feed_forward(self, ops: Operations, layer: LayerWeights, x: Array) -> Array:
        assert isinstance(layer, MoeLayerWeights)
        config = self.config
        x = ops.rms_norm(x, layer.ffn_norm, config.rms_norm_eps)
        experts = layer.ffn_gate_exps, layer.ffn_up_exps, layer.ffn_down_exps
        return ops.experts(x, layer.ffn_gate_inp, *experts, config.num_experts_per_tok, config.norm_topk_prob)
