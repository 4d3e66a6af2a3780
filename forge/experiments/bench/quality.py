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
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.text import Text

from forge.backends.devices import check_kv_dtype, kv_dtypes_of
from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.run_control import Found
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.experiments.bench.results import Facts, Progress, shown, silent
from forge.experiments.bench.tables import Part, Table, title
from forge.llm import LLM
from forge.views.formatting import count, plural
from forge.views.palette import QUIET
from forge.views.progress import progress_line
from forge.views.text import one_line
from forge.workload.judging import HELD_OUT

WINDOW = 512
"""Tokens that a variant reads from an empty cache."""
ROWS_AT_ONCE = 64
"""Rows of logits turned into float64 probabilities at a time."""
REFERENCE = ("reference", "float32")
DEFAULT_MODELS = ("tales-q8_0", "tales-q4_0")
DEFAULT_TOKENS = 2048
SCHEMA = 1


@command
def bench_quality(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A bundled model's name, or a GGUF file; may be repeated. The others are held against the first too.",
            show_default=", ".join(DEFAULT_MODELS),
        ),
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="float32, float16, bfloat16 or int8; may be repeated.", show_default="all that the device has"
        ),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="cpu, reference or cuda; may be repeated.", show_default="cpu")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Held-out text, UTF-8.", show_default="held-out stories")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read at most.")] = DEFAULT_TOKENS,
    *,
    engine: Annotated[EngineArgs, Takes("threads")],
    json: options.JsonOption = False,
) -> Found:
    """Perplexity and KL divergence against float32 on held-out text, by quantization and KV dtype."""
    devices = device or ["cpu"]
    for dtype, each in product(kv_dtype or (), devices):
        check_kv_dtype(dtype, each)
    path = Path(text).expanduser() if text else None
    with progress_line() as progress:
        facts = run(models or DEFAULT_MODELS, kv_dtype, devices, path, tokens, engine.threads, progress)
    return shown(facts, screen(facts), json)


@dataclass
class Tally:
    """Sums over the positions seen so far of one variant against one reference."""

    positions: int = 0
    kl: float = 0.0
    kl_max: float = 0.0
    agreed: int = 0

    def add(self, divergences: np.ndarray, agreed: int) -> None:
        self.positions += len(divergences)
        self.kl += float(divergences.sum())
        self.kl_max = max(self.kl_max, float(divergences.max()))
        self.agreed += agreed

    def result(self, reference: str) -> Facts:
        """kl: the mean, in nats per token; kl_max: the worst position's; top1_agreement: the share of positions."""
        kl, agreement = self.kl / self.positions, self.agreed / self.positions
        return {"reference": reference, "kl": kl, "kl_max": self.kl_max, "top1_agreement": agreement}


@dataclass
class _Variant:
    """One way to compute, while the text goes by."""

    model: str
    device: str
    kv_dtype: str
    llm: LLM
    tallies: dict[str, Tally]
    """By the model whose float32 reference it is held against, its own file's first."""
    nll: float = 0.0

    @property
    def is_reference(self) -> bool:
        return (self.device, self.kv_dtype) == REFERENCE

    def result(self, tokens: int) -> Facts:
        named = {"model": self.model, "device": self.device, "kv_dtype": self.kv_dtype}
        against = [tally.result(name) for name, tally in self.tallies.items()]
        return named | {"perplexity": perplexity(self.nll, tokens), "against": against}


def run(
    models: Sequence[str] = DEFAULT_MODELS,
    kv_dtypes: Sequence[str] | None = None,
    devices: Sequence[str] = ("cpu",),
    text: Path | None = None,
    tokens: int = DEFAULT_TOKENS,
    threads: int | None = None,
    on_progress: Progress = silent,
) -> Facts:
    """Measure every model on every device with every KV dtype, and each model's float32 reference.

    The first model's reference is what the others are held against besides their own. kv_dtypes: None for all that a
    device has. tokens: of the text, at most.

    Raises `UsageError` for a text too short to predict anything, or models whose tokens do not mean the same.
    """
    if tokens < 2:
        raise UsageError(f"--tokens is at least 2, and {tokens} is less")
    loaded: dict[tuple[str, str], LLM] = {}
    for model in dict.fromkeys(models):
        for device in dict.fromkeys([REFERENCE[0], *devices]):
            on_progress(f"loading {model} on {device}")
            loaded[model, device] = LLM(model, device=device, threads=threads, max_num_seqs=1)
    first = loaded[models[0], REFERENCE[0]]
    windows = _windows(first, _read(text), tokens, min(WINDOW, *(llm.max_model_len for llm in loaded.values())))
    for llm in loaded.values():
        if not _speaks_like(llm, first):
            raise UsageError(f"{llm.model_name} and {first.model_name} have different vocabularies: one at a time")
    variants = list(_variants(loaded, models, kv_dtypes, devices))
    for number, window in enumerate(windows, start=1):
        on_progress(f"window {number} of {len(windows)}")
        _read_window(window, variants)
    predicted = sum(len(window) - 1 for window in windows)
    return {
        "schema": SCHEMA,
        "benchmark": "quality",
        "text": str(text) if text else "held-out stories",
        "tokens": predicted,
        "windows": len(windows),
        "window": max(map(len, windows)),
        "variants": [variant.result(predicted) for variant in variants],
    }


def perplexity(nll: float, tokens: int) -> float:
    """From the sum of negative log likelihoods (nats) of `tokens` tokens."""
    return math.exp(nll / tokens)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """`[rows, vocab]` → their log softmax, float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def negative_log_likelihood(logits: np.ndarray, token_ids: Sequence[int]) -> float:
    """Of the tokens that followed: row i of logits `[n, vocab]` predicts `token_ids[i]`. The sum, in nats."""
    total = 0.0
    for start, rows in _parts(logits):
        following = np.asarray(token_ids[start : start + len(rows)])
        total -= float(log_probabilities(rows)[np.arange(len(rows)), following].sum())
    return total


def divergences(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(softmax(reference) || softmax(logits)) of each row, float64 nats. At least 0, and exactly 0 for equal rows."""
    out = np.empty(len(reference))
    for start, rows in _parts(reference):
        p, q = log_probabilities(rows), log_probabilities(logits[start : start + len(rows)])
        # Summing p * (p/q's log) + q - p adds nothing, because both sum to 1, and leaves no term below 0.
        terms = np.exp(p) * (p - q) + np.exp(q) - np.exp(p)
        out[start : start + len(rows)] = np.maximum(terms, 0).sum(axis=1)
    return out


def _variants(loaded, models, kv_dtypes, devices) -> Iterator[_Variant]:
    """Each model's reference, then its variants."""
    for model in dict.fromkeys(models):
        wanted = [REFERENCE, *((device, each) for device in devices for each in kv_dtypes or kv_dtypes_of(device))]
        for device, kv_dtype in dict.fromkeys(wanted):
            tallies = {name: Tally() for name in dict.fromkeys([model, models[0]])}
            yield _Variant(model, device, kv_dtype, loaded[model, device], tallies)


def _read_window(window: list[int], variants: list[_Variant]) -> None:
    """Every variant predicts one window: the references first, because all others are held against them."""
    references: dict[str, np.ndarray] = {}
    for variant in sorted(variants, key=lambda variant: not variant.is_reference):
        variant.llm.kv_dtype = variant.kv_dtype  # what `logits` rounds to: its storage is made per call
        logits = variant.llm.logits(window)[:-1]
        if variant.is_reference:
            references[variant.model] = logits
        variant.nll += negative_log_likelihood(logits, window[1:])
        for name, tally in variant.tallies.items():
            agreed = int((references[name].argmax(axis=1) == logits.argmax(axis=1)).sum())
            tally.add(divergences(references[name], logits), agreed)


def _windows(llm: LLM, text: str, tokens: int, window: int) -> list[list[int]]:
    """The first `tokens` tokens of the text, cut into windows; a last one that predicts nothing is left out."""
    ids = llm.tokenizer.encode(text, allow_special=True)[:tokens]
    cuts = [*range(0, len(ids), window), len(ids)]
    windows = [ids[start:stop] for start, stop in pairwise(cuts) if stop - start > 1]
    if not windows:
        raise UsageError("the text is too short: two tokens are the least that predicts anything")
    return windows


def _speaks_like(llm: LLM, other: LLM) -> bool:
    ids = [model.tokenizer.encode("Once upon a time there was a fox, 1 2 3: \u00e9\u4e2d") for model in (llm, other)]
    return llm.model.vocab_size == other.model.vocab_size and ids[0] == ids[1]


def _read(text: Path | None) -> str:
    path = text or HELD_OUT
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} does not belong there") from None


def _parts(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield start, rows[start : start + ROWS_AT_ONCE]


def screen(facts: Facts) -> Iterator[Part]:
    """Perplexity by variant, and how far each is from float32: a table per model."""
    yield title("What do quantization and rounding cost in accuracy?")
    text = f"{one_line(facts['text'])}: {plural(facts['tokens'], 'token')} predicted"
    yield from (f"{text} in {plural(facts['windows'], 'window')} of {count(facts['window'])}", None)
    for model, group in groupby(facts["variants"], key=lambda one: one["model"]):
        variants = list(group)
        headings, rows = [_short_name(model), "KV", "perplexity"], []
        for number in range(len(variants[0]["against"])):
            star = "*" * number
            headings += [f"KL{star}", *(["worst"] if number == 0 else []), f"top 1{star}"]
        for one in variants:
            cells = [one["device"], one["kv_dtype"], f"{one['perplexity']:,.4f}"]
            for number, each in enumerate(one["against"]):
                worst = [f"{each['kl_max'] * 1e3:,.0f}"] if number == 0 else []
                cells += [f"{each['kl'] * 1e3:,.3f}", *worst, f"{each['top1_agreement'] * 100:.2f} %"]
            is_reference = (one["device"], one["kv_dtype"]) == REFERENCE
            rows.append([Text(cell, QUIET) for cell in cells] if is_reference else cells)
        yield from (Table(headings, rows, names=2), None)
    if any(len(one["against"]) > 1 for one in facts["variants"]):
        first = _short_name(facts["variants"][0]["model"])
        yield f"* held against {first} in float32, not against the file itself."
    yield (
        "KL: divergence from the float32 reference's distribution, in thousandths of a nat per token; worst: the "
        "largest of any token; top 1: how often both hold the same token for the likeliest. The reference multiplies "
        "dequantized weights in float32; cpu rounds activations to int8 too."
    )


def _short_name(model: str) -> str:
    """Of a path, the file's name without its ending."""
    return one_line(Path(model).name.removesuffix(".gguf"))
