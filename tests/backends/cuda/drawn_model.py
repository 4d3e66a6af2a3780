"""A model of a published shape with random weights that are drawn on the device: no file, no package but torch.

What a step costs depends on shapes and types alone (`forge.model.synth` writes such models as files). The tokenizer is
one of bytes: prompts are token ids, and most of what is generated has no text.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forge.backends.cuda.weights import DENSE, Q4_K, Q8, Matrix, Packed
from forge.model.config import Qwen3Config, expected_tensors

if TYPE_CHECKING:
    from forge import LLM

OUTPUT_NORM = 4.0
"""As in `forge.model.synth`: the logits then deviate by about 4."""


def drawn_matrix(
    name: str, rows: int, columns: int, kind: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Matrix:
    """Weights of mean 0 and deviation 1 / sqrt(columns), about."""
    if kind == DENSE:
        values = torch.randn(rows, columns, device=device) * columns**-0.5
        return Matrix(name, rows, columns, dense=values.to(dtype))
    width = columns if kind == Q8 else columns // 2
    least, past = (-127, 128) if kind == Q8 else (0, 256)
    values = torch.randint(least, past, (rows, width), device=device).to(torch.int8 if kind == Q8 else torch.uint8)
    step = columns**-0.5 / (73 if kind == Q8 else 4.6)  # integers drawn evenly deviate by that
    if kind == Q4_K:
        scales = torch.randint(20, 44, (rows, columns // 32, 1), device=device).to(torch.uint8)
        factors = torch.tensor([step / 32, 7.5 * step / 32], dtype=torch.float16, device=device)
        both = scales.expand(-1, -1, 2).contiguous()  # the minimum is 7.5 steps, so that the mean is 0
        return Matrix(name, rows, columns, packed=Packed(kind, values, both, factors.repeat(rows, columns // 256, 1)))
    scales = torch.full((rows, columns // 32), step, dtype=torch.float16, device=device)
    return Matrix(name, rows, columns, packed=Packed(kind, values, scales))


def drawn_llm(config: Qwen3Config, kind: int = DENSE, *, device: str = "cuda", backend=None, **options) -> "LLM":
    """Return an `LLM` of that shape. backend: a `CudaBackend`, if not the plain one. options: of `LLM`."""
    from forge import LLM
    from forge.backends.cuda.backend import CudaBackend
    from forge.model.loader import LoadedModel
    from forge.model.qwen3 import DenseLayerWeights, Qwen3, Qwen3Weights

    backend, where, shapes = backend or CudaBackend(device), torch.device(device), expected_tensors(config)

    def drawn(name: str, mean: float = 1.0) -> Any:
        shape = shapes[f"{name}.weight"]
        if len(shape) == 2:
            return drawn_matrix(f"{name}.weight", *shape, kind, where)
        return mean * (1 + 0.1 * torch.randn(shape, device=where))

    torch.manual_seed(0)
    embedding = drawn("token_embd")
    layers = tuple(
        DenseLayerWeights(**{field.name: drawn(f"blk.{index}.{field.name}") for field in fields(DenseLayerWeights)})
        for index in range(config.num_layers)
    )
    head = embedding if config.tie_word_embeddings else drawn("output")
    weights = Qwen3Weights(embedding, layers, drawn("output_norm", OUTPUT_NORM), head)
    loaded = LoadedModel(
        name=f"drawn, kind {kind}",
        model=Qwen3(config, weights, backend),
        tokenizer=_bytes_tokenizer(config.vocab_size),
        device_description=backend.description,
        default_kv_dtype=backend.default_kv_dtype,
    )
    return LLM(loaded, device="cuda", **options)


def _bytes_tokenizer(vocab_size: int):
    """One token for each byte, three control tokens, and names for the rest."""
    from forge.tokenizer.byte_tokenizer import CONTROL_TOKENS
    from forge.tokenizer.spec import BYTE_ALPHABET, TokenizerSpec, TokenType
    from forge.tokenizer.tokenizer import Tokenizer

    tokens = [*BYTE_ALPHABET, *CONTROL_TOKENS]
    types = [TokenType.NORMAL] * len(BYTE_ALPHABET) + [TokenType.CONTROL] * len(CONTROL_TOKENS)
    padding = vocab_size - len(tokens)
    tokens += [f"[PAD{number}]" for number in range(padding)]
    return Tokenizer(TokenizerSpec(tokens, np.array([*types, *[TokenType.UNUSED] * padding]), merges=()))
