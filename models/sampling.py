"""Text from a network in training: a batch of rows with a key-value cache, greedy or sampled.

It serves distillation (the target writes text for the draft to learn from) and evaluation. The engine of this project does not use it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .network import Attention, Qwen3, rotate


class Cache:
    """Keys and values of every layer, [batch, kv_heads, capacity, head_dim], filled up to `length`."""

    def __init__(self, model: Qwen3, batch: int, capacity: int) -> None:
        config = model.config
        shape = (config.block_count, batch, config.head_count_kv, capacity, config.head_dim)
        self.keys, self.values, self.length = torch.zeros(shape), torch.zeros(shape), 0


def attend(attention: Attention, x: Tensor, model: Qwen3, cache: Cache, layer: int) -> Tensor:
    """Attention of new positions x [batch, new, width] over the cache and themselves; writes their keys and values."""
    batch, new, _ = x.shape
    start, end = cache.length, cache.length + new
    cos, sin = model.cos[start:end], model.sin[start:end]
    split = (batch, new, -1, attention.head_dim)
    q = rotate(attention.q_norm(attention.q(x).view(split)), cos, sin).transpose(1, 2)
    cache.keys[layer, :, :, start:end] = rotate(attention.k_norm(attention.k(x).view(split)), cos, sin).transpose(1, 2)
    cache.values[layer, :, :, start:end] = attention.v(x).view(split).transpose(1, 2)
    visible = torch.ones(new, end, dtype=torch.bool).tril(start)
    keys, values = cache.keys[layer, :, :, :end], cache.values[layer, :, :, :end]
    mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
    return attention.output(mixed.transpose(1, 2).reshape(batch, new, -1))


@torch.no_grad()
def last_logits(model: Qwen3, tokens: Tensor, cache: Cache) -> Tensor:
    """Run tokens [batch, new] after what is cached; the logits of the last position, [batch, vocab]."""
    x = model.token_embd(tokens)
    for layer, block in enumerate(model.blocks):
        x = x + attend(block.attn, block.attn_norm(x), model, cache, layer)
        x = x + block.ffn(block.ffn_norm(x))
    cache.length += tokens.shape[1]
    return F.linear(model.output_norm(x[:, -1]), model.token_embd.weight)


@torch.no_grad()
def extend(model: Qwen3, tokens: Tensor, length: int, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """Continue rows [batch, start] to [batch, length]. `temperature` is per row, [batch]; zero is greedy."""
    cache = Cache(model, tokens.shape[0], length)
    logits = last_logits(model, tokens, cache)
    while True:
        scaled = logits / temperature.clamp(min=1e-6)[:, None]
        sampled = torch.multinomial(scaled.softmax(-1), 1, generator=generator)
        chosen = torch.where(temperature[:, None] > 0, sampled, logits.argmax(-1, keepdim=True))
        tokens = torch.cat((tokens, chosen), dim=1)
        if tokens.shape[1] == length:
            return tokens
        logits = last_logits(model, chosen, cache)
