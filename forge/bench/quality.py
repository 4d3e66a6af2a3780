"""`forge bench quality`: what quantized weights, quantized activations and rounded keys and values cost in accuracy.

Every variant reads the same held-out text in windows, each from an empty cache, and predicts every token of it but a
window's first. Held against the float32 reference of the same file (weights dequantized, everything else float32):

- perplexity, exp of the mean negative log likelihood of the tokens that really come (Jelinek et al. 1977);
- KL divergence from the reference's distribution to the variant's, mean over positions, in nats per token: it sees
  what perplexity averages away (Kullback and Leibler 1951);
- top-1 agreement: how often both hold the same token for the likeliest.

A file that is a quantization of another is held against that one's reference too. All sums are float64.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Annotated

import numpy as np

from forge.backends.devices import check_kv_dtype, kv_dtypes_of
from forge.bench.kit import Facts, Progress, benchmark, option
from forge.cli.arguments import Takes
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.llm import LLM
from forge.views.palette import QUIET
from forge.views.screen import Part, Table, fill, title
from forge.views.text import one_line
from forge.workload.judging import HELD_OUT

WINDOW = 512
"""Tokens that a variant reads from an empty cache."""
ROWS_AT_ONCE = 64
"""Rows of logits turned into float64 probabilities at a time."""
REFERENCE = ("reference", "float32")
DEFAULT_MODELS = ("tales-q8_0", "tales-q4_0")
_MODELS = "A bundled model's name, or a GGUF file; may be repeated. The others are held against the first too."


def screen(facts: Facts) -> Iterator[Part]:
    """Draw the perplexity of each variant, and how far each is from float32: a table per model."""
    yield title("What do quantization and rounding cost in accuracy?")
    text = "{text:line}: {tokens:plural token} predicted in {windows:plural window} of {window:count}"
    yield from (fill(text, facts), None)

    def short_name(model: str) -> str:
        """Return a model's name, or a path's file name without its ending."""
        return one_line(Path(model).name.removesuffix(".gguf"))

    several = False
    for model, group in groupby(facts["variants"], key=lambda variant: variant["model"]):
        variants = [
            variant | {str(number): reference for number, reference in enumerate(variant["against"])}
            for variant in group
        ]
        columns = [f"{short_name(model)}: {{device}}", "KV: {kv_dtype}", "perplexity: {perplexity:,.4f}"]
        columns += ["KL: {0.kl:nats}", "worst: {0.kl_max:rough}", "top 1: {0.top1_agreement:top}"]
        if "1" in variants[0]:
            several = True
            columns += ["KL*: {1.kl:nats}", "top 1*: {1.top1_agreement:top}"]
        shown = {
            "nats": lambda kl: f"{kl * 1e3:,.3f}",
            "rough": lambda kl: f"{kl * 1e3:,.0f}",
            "top": lambda share: f"{share * 100:.2f} %",
        }
        quiet = lambda variant: QUIET if (variant["device"], variant["kv_dtype"]) == REFERENCE else ""  # noqa: E731
        yield from (Table.of(variants, *columns, formats=shown, row_style=quiet, names=2), None)
    if several:
        first = short_name(facts["variants"][0]["model"])
        yield f"* held against {first} in float32, not against the file itself."
    yield (
        "KL: divergence from the float32 reference's distribution, in thousandths of a nat per token; worst: the "
        "largest of any token; top 1: how often both hold the same token for the likeliest. The reference multiplies "
        "dequantized weights in float32; cpu rounds activations to int8 too."
    )


@benchmark(screen)
def bench_quality(
    say: Progress,
    models: Annotated[list[str] | None, option(_MODELS, "--model", "-m", default=", ".join(DEFAULT_MODELS))] = None,
    kv_dtype: Annotated[
        list[str] | None,
        option("float32, float16, bfloat16 or int8; may be repeated.", default="all that the device has"),
    ] = None,
    device: Annotated[list[str] | None, option("cpu, reference or cuda; may be repeated.", default="cpu")] = None,
    text: Annotated[str | None, option("Held-out text, UTF-8.", default="held-out stories")] = None,
    tokens: Annotated[int, option("Tokens of the text to read at most.")] = 2048,
    *,
    engine: Annotated[EngineArgs, Takes("threads")],
) -> Facts:
    """Perplexity and KL divergence against float32 on held-out text, by quantization and KV dtype."""
    devices = device or ["cpu"]
    for dtype, one in product(kv_dtype or (), devices):
        check_kv_dtype(dtype, one)
    if tokens < 2:
        raise UsageError(f"--tokens is at least 2, and {tokens} is less")
    pairs = [REFERENCE, *((device, dtype) for device in devices for dtype in kv_dtype or kv_dtypes_of(device))]
    content = _read(text)
    loaded: dict[tuple[str, str], LLM] = {}
    variants = []
    for model in dict.fromkeys(models or DEFAULT_MODELS):
        for one, dtype in dict.fromkeys(pairs):
            if (model, one) not in loaded:
                say(f"loading {model} on {one}")
                threads = None if one == "reference" else engine.threads  # which that device has none of
                loaded[model, one] = LLM(model, device=one, threads=threads, max_num_seqs=1)
            variants.append(_Variant(model, one, dtype, loaded[model, one]))
    first = variants[0]
    windows = _windows(first.llm, content, tokens, min(WINDOW, *(llm.max_model_len for llm in loaded.values())))
    for llm in loaded.values():
        if not _speaks_like(llm, first.llm):
            raise UsageError(f"{llm.model_name} and {first.llm.model_name} have different vocabularies: one at a time")
    for number, window in enumerate(windows, start=1):
        say(f"window {number} of {len(windows)}")
        _read_window(window, variants, first.model)
    predicted = sum(len(window) - 1 for window in windows)
    return {
        "schema": 1,
        "benchmark": "quality",
        "text": text or "held-out stories",
        "tokens": predicted,
        "windows": len(windows),
        "window": max(map(len, windows)),
        "variants": [variant.result(predicted) for variant in variants],
    }


@dataclass
class _Variant:
    """One way to compute, while the text goes by."""

    model: str
    device: str
    kv_dtype: str
    llm: LLM
    nll: float = 0.0
    seen: dict[str, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    """Model whose float32 reference it is compared with (its own file's first) → for each window, every position's
    divergence, and whether both had the same most likely token."""

    @property
    def is_reference(self) -> bool:
        return (self.device, self.kv_dtype) == REFERENCE

    def result(self, tokens: int) -> Facts:
        """Return the figures. kl: the mean, in nats per token; kl_max: the worst position's; top1_agreement: the share
        of positions."""
        against = []
        for name, windows in self.seen.items():
            kl, agreed = (np.concatenate(column) for column in zip(*windows, strict=True))
            figures = {"kl": float(kl.mean()), "kl_max": float(kl.max()), "top1_agreement": float(agreed.mean())}
            against.append({"reference": name, **figures})
        named = {"model": self.model, "device": self.device, "kv_dtype": self.kv_dtype}
        return named | {"perplexity": perplexity(self.nll, tokens), "against": against}


def _read_window(window: list[int], variants: list[_Variant], first: str) -> None:
    """Predict one window with every variant: the references first, because all others are compared with them."""
    references: dict[str, np.ndarray] = {}
    for variant in sorted(variants, key=lambda variant: not variant.is_reference):
        variant.llm.kv_dtype = variant.kv_dtype  # what `logits` rounds to: its storage is made per call
        logits = variant.llm.logits(window)[:-1]
        if variant.is_reference:
            references[variant.model] = logits
        variant.nll += negative_log_likelihood(logits, window[1:])
        for name in dict.fromkeys([variant.model, first]):
            agreed = references[name].argmax(axis=1) == logits.argmax(axis=1)
            variant.seen.setdefault(name, []).append((divergences(references[name], logits), agreed))


def perplexity(nll: float, tokens: int) -> float:
    """Return the perplexity of `tokens` tokens whose negative log likelihoods sum to `nll` nats."""
    return math.exp(nll / tokens)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Compute the log softmax of each row of `[rows, vocab]`, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def negative_log_likelihood(logits: np.ndarray, token_ids: Sequence[int]) -> float:
    """Sum the negative log likelihoods, in nats, of the tokens that followed: row i of logits `[n, vocab]` predicts
    `token_ids[i]`."""
    total = 0.0
    for start, rows in _parts(logits):
        following = np.asarray(token_ids[start : start + len(rows)])
        total -= float(log_probabilities(rows)[np.arange(len(rows)), following].sum())
    return total


def divergences(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Compute KL(softmax(reference) || softmax(logits)) of each row, float64 nats. At least 0, and 0 for equal rows."""
    out = np.empty(len(reference))
    for start, rows in _parts(reference):
        p, q = log_probabilities(rows), log_probabilities(logits[start : start + len(rows)])
        # Summing p * (p/q's log) + q - p adds nothing, because both sum to 1, and leaves no term below 0.
        terms = np.exp(p) * (p - q) + np.exp(q) - np.exp(p)
        out[start : start + len(rows)] = np.maximum(terms, 0).sum(axis=1)
    return out


def _windows(llm: LLM, text: str, tokens: int, window: int) -> list[list[int]]:
    """Return the first `tokens` tokens of the text, cut into windows; a last one that predicts nothing is left out."""
    ids = llm.tokenizer.encode(text, allow_special=True)[:tokens]
    cuts = [*range(0, len(ids), window), len(ids)]
    windows = [ids[start:stop] for start, stop in pairwise(cuts) if stop - start > 1]
    if not windows:
        raise UsageError("the text is too short: two tokens are the least that predicts anything")
    return windows


def _speaks_like(llm: LLM, other: LLM) -> bool:
    ids = [model.tokenizer.encode("Once upon a time there was a fox, 1 2 3: \u00e9\u4e2d") for model in (llm, other)]
    return llm.model.vocab_size == other.model.vocab_size and ids[0] == ids[1]


def _read(text: str | None) -> str:
    path = Path(text).expanduser() if text else HELD_OUT
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} does not belong there") from None


def _parts(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield start, rows[start : start + ROWS_AT_ONCE]
