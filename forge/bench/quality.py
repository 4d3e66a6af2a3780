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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge.errors import UsageError

if TYPE_CHECKING:
    from forge.llm import LLM

HELD_OUT = Path(__file__).with_name("held_out.txt")
"""Text that the bundled models were not trained on: documents of `models/corpus` with numbers from `HELD_OUT` on, which
training never reaches."""
WINDOW = 512
"""Tokens that a variant reads from an empty cache."""
ROWS_AT_ONCE = 64
"""Rows of logits turned into float64 probabilities at a time."""
REFERENCE = ("reference", "float32")
DEFAULT_MODELS = ("tales-q8_0", "tales-q4_0")
DEFAULT_TOKENS = 2048
SCHEMA = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Variant:
    """One way to compute."""

    model: str
    device: str
    kv_dtype: str

    @property
    def is_reference(self) -> bool:
        return (self.device, self.kv_dtype) == REFERENCE


@dataclass(frozen=True)
class Divergence:
    """A variant held against a reference."""

    reference: str
    """The model whose float32 reference it is."""
    kl: float
    """Mean, in nats per token."""
    kl_max: float
    """The worst position's."""
    top1_agreement: float
    """Share of positions."""


@dataclass(frozen=True)
class Quality:
    """What one variant said about the text."""

    variant: Variant
    perplexity: float
    against: tuple[Divergence, ...]
    """Its own file's reference first."""


@dataclass(frozen=True)
class QualityBenchmark:
    """One run."""

    text: str
    """Where the text came from."""
    tokens: int
    """Predicted, in all windows together."""
    windows: int
    window: int
    qualities: tuple[Quality, ...]


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

    def result(self, reference: str) -> Divergence:
        return Divergence(reference, self.kl / self.positions, self.kl_max, self.agreed / self.positions)


@dataclass
class _Running:
    """A variant while the text goes by."""

    variant: Variant
    llm: "LLM"
    references: tuple[str, ...]
    nll: float = 0.0
    tallies: dict[str, Tally] = field(default_factory=dict)

    def __post_init__(self):
        self.tallies = {name: Tally() for name in self.references}

    def result(self, tokens: int) -> Quality:
        against = tuple(tally.result(name) for name, tally in self.tallies.items())
        return Quality(self.variant, perplexity(self.nll, tokens), against)


def run(
    models: Sequence[str] = DEFAULT_MODELS,
    kv_dtypes: Sequence[str] = ("float32", "float16", "bfloat16"),
    devices: Sequence[str] = ("cpu",),
    text: Path | None = None,
    tokens: int = DEFAULT_TOKENS,
    threads: int | None = None,
    on_progress: Progress = lambda text: None,
) -> QualityBenchmark:
    """Measure every model on every device with every KV dtype, and each model's float32 reference.

    The first model's reference is what the others are held against besides their own. tokens: of the text, at most.

    Raises `UsageError` for a text too short to predict anything, or models whose tokens do not mean the same.
    """
    if tokens < 2:
        raise UsageError(f"--tokens is at least 2, and {tokens} is less")
    from forge.llm import LLM

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
    runnings = list(_variants(loaded, models, kv_dtypes, devices))
    for number, window in enumerate(windows, start=1):
        on_progress(f"window {number} of {len(windows)}")
        _read_window(window, runnings)
    predicted = sum(len(window) - 1 for window in windows)
    return QualityBenchmark(
        text=str(text) if text else "held-out stories",
        tokens=predicted,
        windows=len(windows),
        window=max(map(len, windows)),
        qualities=tuple(running.result(predicted) for running in runnings),
    )


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


def quality_object(result: QualityBenchmark) -> dict[str, Any]:
    """A run for `--json`."""
    return {
        "schema": SCHEMA,
        "benchmark": "quality",
        "text": result.text,
        "tokens": result.tokens,
        "windows": result.windows,
        "window": result.window,
        "variants": [
            asdict(quality.variant)
            | {"perplexity": quality.perplexity, "against": [asdict(one) for one in quality.against]}
            for quality in result.qualities
        ],
    }


def _variants(loaded, models, kv_dtypes, devices) -> Iterator[_Running]:
    """Each model's reference, then its variants."""
    for model in dict.fromkeys(models):
        references = tuple(dict.fromkeys([model, models[0]]))
        wanted = [REFERENCE, *((device, kv_dtype) for device in devices for kv_dtype in kv_dtypes)]
        for device, kv_dtype in dict.fromkeys(wanted):
            yield _Running(Variant(model, device, kv_dtype), loaded[model, device], references)


def _read_window(window: list[int], runnings: list[_Running]) -> None:
    """Let every variant predict one window: the references first, because all others are held against them."""
    references: dict[str, np.ndarray] = {}
    for running in sorted(runnings, key=lambda running: not running.variant.is_reference):
        running.llm.kv_dtype = running.variant.kv_dtype  # what `logits` rounds to: its storage is made per call
        logits = running.llm.logits(window)[:-1]
        if running.variant.is_reference:
            references[running.variant.model] = logits
        running.nll += negative_log_likelihood(logits, window[1:])
        for name, tally in running.tallies.items():
            reference = references[name]
            agreed = int((reference.argmax(axis=1) == logits.argmax(axis=1)).sum())
            tally.add(divergences(reference, logits), agreed)


def _windows(llm: "LLM", text: str, tokens: int, window: int) -> list[list[int]]:
    """The first `tokens` tokens of the text, cut into windows; a last one that predicts nothing is left out."""
    ids = llm.tokenizer.encode(text, allow_special=True)[:tokens]
    cuts = [*range(0, len(ids), window), len(ids)]
    windows = [ids[start:stop] for start, stop in pairwise(cuts) if stop - start > 1]
    if not windows:
        raise UsageError("the text is too short: two tokens are the least that predicts anything")
    return windows


def _speaks_like(llm: "LLM", other: "LLM") -> bool:
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
