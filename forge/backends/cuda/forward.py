"""The forward pass as fused steps: about five launches a layer for a decode, then the output head.

Read it beside `Qwen3.forward_pass`: the same network, in the groups that `network.py` recognised. There is no
synchronization in it, and nothing depends on the batch but through `Inputs`, so it can be captured in a CUDA graph as
it stands; its arrays then come from the graph's own memory.
"""

import torch

from forge.backends.cuda.inputs import Inputs
from forge.backends.cuda.launches import Launches
from forge.backends.cuda.network import Layer, Network
from forge.backends.cuda.storage import TorchKvStorage
from forge.backends.cuda.weights import Matrix


def forward(
    network: Network,
    output_head: Matrix | None,
    run: Launches,
    inputs: Inputs,
    storage: TorchKvStorage,
    samples: torch.Tensor,
) -> torch.Tensor:
    """Write the step's keys and values; return logits on the device, float32 `[logit rows, vocabulary]`.

    samples: int32 `[logit rows or more, 2]`; input tokens may be taken from there, and the argmax of each logit row is
    left there with the bits of its logit. Without an output head: the last norm's result, float32
    `[logit rows, hidden]`, and no samples.
    """
    shape = inputs.shape
    with run.step("embed", -1):
        x = run.embed(network.embedding, inputs, samples)
    for index, layer in enumerate(network.layers):
        logit_rows_only = shape.prunes and index == len(network.layers) - 1
        attended = _attend(run, x, layer, storage, index, inputs, logit_rows_only)
        if attended is None:  # a chunk that only fills the cache: its keys are written, and that was all
            return x.new_empty(
                (0, x.shape[1] if output_head is None else output_head.out_features), dtype=torch.float32
            )
        if logit_rows_only:
            x = run.pick(x, inputs)
        with run.step("attn_output, add", index):
            run.add_product(x, attended, layer.output)
        with run.step("rms_norm, ffn_gate, ffn_up, swiglu", index):
            gated = run.gated(x, layer.feed_forward_norm, layer.gate_up)
        with run.step("ffn_down, add", index):
            run.add_product(x, gated, layer.down)
    if not (shape.is_decode or shape.prunes):
        x = run.pick(x, inputs)
    if output_head is None:
        with run.step("rms_norm", -1):
            return run.normed(x, network.final_norm, torch.float32)
    with run.step("rms_norm, output head", -1):
        logits = run.logits(x, network.final_norm, output_head)
    with run.step("argmax", -1):
        run.argmax(logits, samples)
    return logits


def _attend(
    run: Launches,
    x: torch.Tensor,
    layer: Layer,
    storage: TorchKvStorage,
    index: int,
    inputs: Inputs,
    logit_rows_only: bool,
) -> torch.Tensor | None:
    """Attend in one layer. Returns None in the last layer if no row needs logits."""
    with run.step("rms_norm, attn_q, attn_k, attn_v", index):
        qkv = run.products(x, layer.attention_norm, layer.qkv)
    if run.fuses_attention(inputs):
        with run.step("head norm, rope, write_kv, attention", index):
            return run.decode_attention(qkv, layer, storage, index, inputs)
    with run.step("head norm, rope, write_kv", index):
        run.store_heads(qkv, layer, storage, index, inputs)
    if logit_rows_only and inputs.shape.num_logit_rows == 0:
        return None
    with run.step("attention", index):
        return run.attention(qkv, storage, index, inputs, logit_rows_only)
