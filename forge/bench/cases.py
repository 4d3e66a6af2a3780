"""The figures and loads of `forge bench cpu` and `cuda`: what each computes, and what that takes of the machine at
least.

A decode case fills its sequences' caches by prefill first, then times single steps that each compute one token per
sequence *at the same position*: the key and value written there are overwritten by the next step. A prefill case
computes all its tokens in one batch and the logits of the last. Token ids are random, the same for every process.

A load of requests is a closed loop: when a request ends, the next begins.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from forge.cache.kv_storage import vector_bytes

FORGE = "forge"
"""The name of forge's own process beside its peers."""
SEED = 1
WARM_ROUNDS = 3
"""Untimed steps, and untimed requests per slot before a load: caches filled, kernels compiled, graphs captured."""
BLOCK_SIZE = 16
"""Tokens of a KV block."""
FLOAT_PRODUCT = 4
"""A float32 multiplication takes the room of this many int8 ones: the lanes of a vector are four times as wide."""
ATTENTION_PRODUCTS = {"float32": 8, "float16": 8, "bfloat16": 4, "int8": 3}
"""A query's product with a number of a key, and a weight's with one of a value, as int8 ones. float16 is multiplied in
float32; int8 meets weights of 16 bits."""


@dataclass(frozen=True)
class Case:
    """One figure."""

    name: str
    """Its name for `--only`."""
    title: str
    kind: Literal["decode", "prefill"]
    sequences: int
    context: int
    """Tokens in each sequence's cache before the step."""
    tokens: int
    """Tokens of each sequence that the step computes."""

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.tokens

    @property
    def length(self) -> int:
        """Positions of each sequence, those of the step included."""
        return self.context + self.tokens

    def token_ids(self, vocab_size: int, seed: int = SEED) -> list[list[int]]:
        """Draw random tokens `[sequences][length]`, the same for every process and every run."""
        rng = random.Random(f"{seed}-{self.name}")
        return [[rng.randrange(vocab_size) for _ in range(self.length)] for _ in range(self.sequences)]


def _decode(sequences: int, context: int, name: str | None = None) -> Case:
    title = f"decode {sequences}" + (f" @ {context:,}" if context != 128 else "")
    return Case(name or f"decode{sequences}@{context}", title, "decode", sequences, context, 1)


def _prefill(tokens: int) -> Case:
    return Case(f"prefill{tokens}", f"prefill {tokens:,}", "prefill", 1, 0, tokens)


CASES = (
    *(
        _decode(rows, context, f"decode{rows}" if context == 128 else None)
        for context in (128, 1024)
        for rows in (1, 2, 4, 16, 64)
        if rows * context < 1 << 16
    ),
    *(_prefill(tokens) for tokens in (128, 512, 2048)),
)
LONG_CASES = (
    *(_decode(rows, context) for rows, context in ((64, 1024), (1, 4096), (16, 4096), (1, 8192), (1, 32768))),
    *(_prefill(tokens) for tokens in (4096, 8192, 32768)),
)


CUDA_STEPS = (
    *(_decode(rows, context) for context in (160, 2048) for rows in (1, 4, 16, 64)),
    *(_prefill(tokens) for tokens in (128, 512)),
)


@dataclass(frozen=True)
class Load:
    """Requests in a closed loop: when one ends, the next begins."""

    name: str
    """Its name for `--only`."""
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int

    @property
    def title(self) -> str:
        return f"{self.prompt_tokens} in, {self.output_tokens} out, {self.concurrency} at a time"

    @property
    def rounds(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The number of requests and the seed of their prompts, in a round that is not timed and in one that is."""
        return (WARM_ROUNDS * self.concurrency, SEED + 1), (self.requests, SEED)


CUDA_LOADS = (
    Load("128in1@1", 128, 1, 1, 100),
    Load("128in32@4", 128, 32, 4, 400),
    *(
        Load(f"512in1@{concurrency}", 512, 1, concurrency, requests)
        for concurrency, requests in ((1, 100), (4, 400), (16, 800), (64, 2000), (96, 2000), (128, 2000))
    ),
)
"""Figures and loads that engines publish for an H200, so that a run can be held against what others measured there."""


@dataclass(frozen=True)
class ModelSize:
    """What a forward pass over this model has to read and to multiply, in any program."""

    file_bytes: int
    layer_bytes: int
    """Bytes of the layers' tensors, as the file stores them; experts not included."""
    head_bytes: int
    """Bytes of the output head, which may be the embedding too."""
    embedding_bytes: int
    """Bytes of an embedding that is not the head; 0 if it is."""
    row_bytes: int
    """Bytes of one row of the embedding."""
    layer_products: int
    """Multiplications per token in the layers' matrices, float ones counted `FLOAT_PRODUCT` times. Of a mixture of
    experts: those of the experts that a token uses."""
    head_products: int
    """Multiplications per row of logits, counted likewise."""
    attention_products: int
    """Multiplications per pair of a query and a key position: both of its dot products, in every layer and query
    head, counted as `ATTENTION_PRODUCTS`."""
    kv_bytes: int
    """Bytes of one token's keys and values in all layers."""
    vocab_size: int
    max_context: int
    expert_bytes: int = 0
    """Bytes of all experts in all layers; 0 for a dense model."""
    share_of_experts: float = 0.0
    """The share of the experts that a token uses."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices and norms; a head that is the embedding too counts once."""
        return self.layer_bytes + self.expert_bytes + self.head_bytes + self.embedding_bytes

    def bytes_of_used_experts(self, rows: int) -> int:
        """Return the bytes of the experts that at least one of `rows` tokens uses, if each layer's are chosen evenly
        and independently."""
        return round(self.expert_bytes * (1 - (1 - self.share_of_experts) ** rows))


@dataclass(frozen=True)
class Needs:
    """The least that one step must read and multiply."""

    bytes_read: int
    """Weights once (of the experts those in use), and the keys and values of all tokens before this step."""
    products: int
    """Multiplications, counted as int8 ones."""


def needs_of(case: Case, size: ModelSize) -> Needs:
    """Return the least that `case` takes: every weight in use read once per step however many rows share it."""
    rows = case.tokens_per_step
    pairs = case.sequences * sum(case.context + row + 1 for row in range(case.tokens))
    weights = size.layer_bytes + size.bytes_of_used_experts(rows) + size.head_bytes + rows * size.row_bytes
    products = rows * size.layer_products + case.sequences * size.head_products + pairs * size.attention_products
    return Needs(weights + case.sequences * case.context * size.kv_bytes, products)


@dataclass(frozen=True)
class Limits:
    """What the machine can do at most: memory bandwidth and arithmetic."""

    bytes_per_second: float
    """Bytes that all threads together read from memory."""
    products_per_second: float
    """int8 multiplications, each with its addition, when the operands are near."""

    @property
    def ridge(self) -> float:
        """Products per byte at which both limits are reached at once."""
        return self.products_per_second / self.bytes_per_second

    def or_better(self, *others: "Limits | None") -> "Limits":
        """Return of each limit the highest: a limit that was reached once is one that can be reached."""
        every = (self, *(limits for limits in others if limits is not None))
        return Limits(
            max(limits.bytes_per_second for limits in every), max(limits.products_per_second for limits in every)
        )


@dataclass(frozen=True)
class Roofline:
    """A step against the machine's limits (Williams, Waterman and Patterson 2009)."""

    bytes_per_second: float
    """Rate at which the step read what it must read at least."""
    products_per_second: float
    bound: Literal["memory", "arithmetic"]
    """The limit that the step would meet first."""
    share: float
    """The share of that limit that was reached: the least time that the step could take, over the time it took."""
    limit_seconds: float

    @classmethod
    def of(cls, needs: Needs, seconds: float, limits: Limits) -> "Roofline":
        memory, arithmetic = needs.bytes_read / limits.bytes_per_second, needs.products / limits.products_per_second
        least = max(memory, arithmetic)
        bound: Literal["memory", "arithmetic"] = "memory" if memory >= arithmetic else "arithmetic"
        return cls(needs.bytes_read / seconds, needs.products / seconds, bound, least / seconds, least)


def measure_model(path: Path, kv_dtype: str) -> ModelSize:
    """Read the `ModelSize` of the model at `path`, with keys and values in `kv_dtype`. Raises the `ForgeError` of its
    format if it is not sound."""
    from forge.gguf import GGMLType
    from forge.model.config import expected_tensors
    from forge.model.loader import open_weights

    with open_weights(path) as weights:
        config = weights.config
        floats = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
        used = config.num_experts_per_tok

        def products(tensor) -> int:
            *experts, rows, columns = tensor.shape
            matrices = used if experts else 1
            return matrices * rows * columns * (FLOAT_PRODUCT if tensor.ggml_type in floats else 1)

        names = [name for name in expected_tensors(config) if name.startswith("blk.")]
        layers = [weights.tensor(name) for name in names]
        embedding = weights.tensor("token_embd.weight")
        head = embedding if config.tie_word_embeddings else weights.tensor("output.weight")
        return ModelSize(
            file_bytes=weights.nbytes if path.is_dir() else path.stat().st_size,
            layer_bytes=sum(tensor.nbytes for tensor in layers if len(tensor.shape) < 3),
            head_bytes=head.nbytes,
            embedding_bytes=0 if config.tie_word_embeddings else embedding.nbytes,
            row_bytes=embedding.nbytes // embedding.shape[0],
            layer_products=sum(products(tensor) for tensor in layers if len(tensor.shape) > 1),
            head_products=products(head),
            attention_products=config.num_layers * config.query_size * ATTENTION_PRODUCTS[kv_dtype],
            kv_bytes=2 * config.num_layers * config.num_key_value_heads * vector_bytes(config.head_dim, kv_dtype),
            vocab_size=config.vocab_size,
            max_context=config.max_position_embeddings,
            expert_bytes=sum(tensor.nbytes for tensor in layers if len(tensor.shape) == 3),
            share_of_experts=used / config.num_experts if config.num_experts else 0.0,
        )


def answered(setting: str, moments: Iterable[tuple[float, float]], seconds: float) -> dict[str, Any]:
    """Return what a worker answers of `requests`. moments: when each request's first token came and when it ended, in
    seconds from its beginning."""
    first, end = zip(*moments, strict=True)
    return {"setting": setting, "seconds": seconds, "first_token": first, "end": end}


def load_figures(load: Load, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return one program's requests under one load, in seconds. per_token: from the first token to the last."""
    first, end, steps = answer["first_token"], answer["end"], load.output_tokens - 1
    return {
        "setting": answer["setting"],
        "requests_per_second": len(end) / answer["seconds"],
        "first_token": percentiles(first),
        "per_token": percentiles([(e - f) / steps for f, e in zip(first, end, strict=True)]) if steps else None,
        "end": percentiles(end),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles by the nearest rank: a value that was measured."""
    ordered = sorted(seconds)
    ranks = {f"p{share}": ordered[max(0, -(-share * len(ordered) // 100) - 1)] for share in (50, 95)}
    return {"mean": mean(ordered), **ranks}


def unique_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Draw random prompts. No two begin with the same token, if there are enough tokens, so no cache can help."""
    rng = random.Random(f"{seed}-{count}-{length}")
    firsts = rng.sample(range(vocab_size), min(count, vocab_size))
    return [
        [firsts[number % vocab_size], *(rng.randrange(vocab_size) for _ in range(length - 1))]
        for number in range(count)
    ]
