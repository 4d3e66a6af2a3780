"""The figures of `forge bench cpu`: what is computed for each, and what of the machine that takes at least.

A decode case fills its sequences' caches by prefill first, then times single steps that each compute one token per
sequence *at the same position*: the key and value written there are overwritten by the next step. A prefill case
computes all its tokens in one batch and the logits of the last. Token ids are random, the same for every contender.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from forge.errors import UsageError

FLOAT_PRODUCT = 4
"""A float32 multiplication takes the room of this many int8 ones: the lanes of a vector are four times as wide."""


@dataclass(frozen=True)
class Case:
    """One figure."""

    name: str
    """What `--only` calls it."""
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

    def token_ids(self, vocab_size: int, seed: int) -> list[list[int]]:
        """`[sequences][length]`, random; the same for every contender and every run."""
        rng = random.Random(f"{seed}-{self.name}")
        return [[rng.randrange(vocab_size) for _ in range(self.length)] for _ in range(self.sequences)]


CASES = (
    Case("decode1", "decode 1", "decode", 1, 128, 1),
    Case("decode1@1024", "decode 1 @ 1,024", "decode", 1, 1024, 1),
    Case("decode4", "decode 4", "decode", 4, 128, 1),
    Case("decode16", "decode 16", "decode", 16, 128, 1),
    Case("prefill128", "prefill 128", "prefill", 1, 0, 128),
    Case("prefill512", "prefill 512", "prefill", 1, 0, 512),
)


def select_cases(names: str | Iterable[str] | None) -> tuple[Case, ...]:
    """The cases that `names` (a list, or text with commas) asks for, in the order of `CASES`; None means all.

    Raises `UsageError` for a name that is none.
    """
    if names is None:
        return CASES
    wanted = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    known = {case.name for case in CASES}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"unknown figure {unknown[0]!r}; there are {', '.join(case.name for case in CASES)}")
    return tuple(case for case in CASES if case.name in wanted)


@dataclass(frozen=True)
class ModelSize:
    """What a forward pass over this model has to read and to multiply, in any program."""

    file_bytes: int
    layer_bytes: int
    """Of the layers' tensors, as the file stores them; experts not included."""
    head_bytes: int
    """Of the output head, which may be the embedding too."""
    embedding_bytes: int
    """Of an embedding that is not the head; 0 where it is."""
    row_bytes: int
    """Of one row of the embedding."""
    layer_products: int
    """Multiplications per token in the layers' matrices, float ones counted `FLOAT_PRODUCT` times. Of a mixture of
    experts: those of the experts that a token uses."""
    head_products: int
    """The same per row of logits."""
    attention_products: int
    """The same per pair of a query and a key position: both of its dot products, in every layer and query head."""
    kv_bytes: int
    """Of one token's keys and values in all layers, at two bytes per number."""
    vocab_size: int
    max_context: int
    expert_bytes: int = 0
    """Of all experts in all layers; 0 for a dense model."""
    share_of_experts: float = 0.0
    """That a token uses."""

    @property
    def weight_bytes(self) -> int:
        """Of all matrices and norms; a head that is the embedding too counts once."""
        return self.layer_bytes + self.expert_bytes + self.head_bytes + self.embedding_bytes

    def bytes_of_used_experts(self, rows: int) -> int:
        """Of the experts that at least one of `rows` tokens uses, each layer's chosen evenly and independently."""
        return round(self.expert_bytes * (1 - (1 - self.share_of_experts) ** rows))


@dataclass(frozen=True)
class Needs:
    """What one step takes at least."""

    bytes_read: int
    """Weights once (of the experts those in use), and the keys and values of all tokens before this step."""
    products: int
    """Multiplications, counted as int8 ones."""


def needs_of(case: Case, size: ModelSize) -> Needs:
    """The least that `case` takes: every weight in use read once per step however many rows share it."""
    rows = case.tokens_per_step
    pairs = case.sequences * sum(case.context + row + 1 for row in range(case.tokens))
    return Needs(
        bytes_read=size.layer_bytes
        + size.bytes_of_used_experts(rows)
        + size.head_bytes
        + rows * size.row_bytes
        + case.sequences * case.context * size.kv_bytes,
        products=rows * size.layer_products + case.sequences * size.head_products + pairs * size.attention_products,
    )


def measure_model(path) -> ModelSize:
    """`ModelSize` of the model at `path`. Raises the `ForgeError` of its format if it is not sound."""
    from forge.gguf import GGMLType
    from forge.model.config import expected_tensors
    from forge.model.weight_source import open_weights

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
            attention_products=2 * config.num_layers * config.query_size * FLOAT_PRODUCT,
            kv_bytes=2 * config.num_layers * config.key_value_size * 2,
            vocab_size=config.vocab_size,
            max_context=config.max_position_embeddings,
            expert_bytes=sum(tensor.nbytes for tensor in layers if len(tensor.shape) == 3),
            share_of_experts=used / config.num_experts if config.num_experts else 0.0,
        )
