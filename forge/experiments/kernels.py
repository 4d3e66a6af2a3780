"""3. Decode is bound by memory, prefill by arithmetic.

[dim]forge kernels --only run --type F16 --type Q4_0[/dim]
[dim]forge kernels --only run --layer[/dim]
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from rich.text import Text

from forge.bench.cases import BLOCK_SIZE, Case, Limits, ModelSize, Needs, Roofline, measure_model, needs_of
from forge.bench.worker import timed
from forge.cache.kv_storage import DEFAULT_KV_DTYPES
from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.experiments.one_layer import layer_report
from forge.model.catalog import DEFAULT_MODEL, model_name, resolve_model
from forge.option import option
from forge.views.charts import Point, roofline
from forge.views.formatting import count, ms, percent, plural, rate, size, two_digits
from forge.views.json_output import as_object
from forge.views.palette import ACCENT, QUIET, TITLE, sequence_style
from forge.views.progress import progress_line
from forge.views.screen import Part, Report, Table, report, sentences, title

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
SHAPE_LAYERS = 8
VOCABULARY = 4096
"""Vocabulary of the made-up model: some layers of Qwen3-0.6B, 130 million weights, more than a processor's cache
holds."""
DEFAULT_TYPES = ("Q8_0", "Q4_0")
CONTEXTS = (16, 500, 2000)
"""Tokens before a single row, whose keys and values it reads."""
STEADY = 1.25
"""Passes whose `spread` is at least this do not tell one explanation from another."""
ROUNDS, ROUND_SECONDS = 5, 0.02
"""Each number of rows has its turn this often, and takes this long or one pass. The shortest pass counts: whatever else
the machine does can only add time, and a burst of it does not last for all turns."""
LIMIT_SECONDS, LIMIT_TURNS = 0.05, 3
"""Each limit is measured for so long, so many times before the models and after each of them; the best counts. The roof
is measured apart from the passes that are held against it."""
ARRAY_BYTES = 1 << 28
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CACHE_BYTES = 32 << 20
"""Assumed size of the processor's last cache if the system does not tell."""
Progress = Callable[[str], None]
"""Called with what is about to be done."""
Work = tuple[Case, Callable[[], object]]
QUESTION = "What does a forward pass wait for?"
_MARKS = "●○◆◇■□"


@dataclass(frozen=True)
class KernelArgs:
    """The models and batch sizes to measure."""

    model: str | None = option(
        None,
        "The model to measure, with --type beside those that are made up.",
        "Model",
        flags="--model -m",
        shown="one that is made up, larger than a processor's cache",
    )
    types: Sequence[str] = option(
        (), "Make it up in this type; may be repeated.", "Model", flags="--type", shown="Q8_0 and Q4_0"
    )
    layer: bool = option(
        False, "Show one layer instead: its operations in order, with shapes, bytes and times, plain and compiled."
    )


@experiment()
def kernels(asked: KernelArgs, engine: Annotated[EngineArgs, Takes("threads")]) -> Experiment:
    from forge.model.synth import find_quantization

    for name in asked.types:
        find_quantization(name)
    path = resolve_model(asked.model) if asked.model is not None else None
    if asked.layer:
        if asked.types:
            raise UsageError("--layer shows a layer of one model: --model says which, --type means nothing with it")
        return Experiment(lambda: layer_report(path or resolve_model(DEFAULT_MODEL), engine.threads))

    def measure() -> Report:
        with progress_line() as progress:
            result = run(path, asked.types, engine.threads, progress)
        return report(kernels_object(result), lambda: screen(result))

    return Experiment(measure)


@dataclass(frozen=True)
class Pass:
    """Timed forward passes with one number of rows."""

    rows: int
    bytes_read: int
    products: int
    seconds: float
    """Seconds of the shortest pass."""
    spread: float = 1.0
    """How many times as long the shortest pass of the median turn took as the shortest of all turns."""

    @property
    def ms(self) -> float:
        return self.seconds * 1e3

    @property
    def ms_per_row(self) -> float:
        return self.ms / self.rows

    @property
    def intensity(self) -> float:
        """Products per byte."""
        return self.products / self.bytes_read

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_read / self.seconds

    @property
    def products_per_second(self) -> float:
        return self.products / self.seconds

    def against(self, limits: Limits) -> Roofline:
        """Return the nearer limit and its share in use: more than 1 if weights come from a cache instead of memory."""
        return Roofline.of(Needs(self.bytes_read, self.products), self.seconds, limits)


@dataclass(frozen=True)
class LongPass:
    """Timed forward passes of one row that attends to this many earlier tokens."""

    context: int
    kv_bytes: int
    bytes_read: int
    """Weights, keys and values."""
    ms: float
    """The shortest's."""


@dataclass(frozen=True)
class Measured:
    """One model's passes."""

    name: str
    size: ModelSize
    threads: int
    passes: tuple[Pass, ...]
    """Its passes by rising number of rows; the first has one row."""
    long_passes: tuple[LongPass, ...] = ()
    """Its passes by rising context."""
    cache_bytes: int = 0
    """Size of the processor's last cache."""

    @property
    def fits_in_cache(self) -> bool:
        """True if the weights may stay in the processor's last-level cache between two passes."""
        return self.size.weight_bytes < self.cache_bytes


@dataclass(frozen=True)
class KernelsResult:
    """The results of `forge kernels`."""

    limits: Limits
    models: tuple[Measured, ...]


def run(
    model: Path | None,
    types: Sequence[str] | None = None,
    threads: int | None = None,
    on_progress: Progress = lambda text: None,
) -> KernelsResult:
    """Measure the machine, synthetic models in each of `types`, and `model`.

    Without types and without a model, models in each of `DEFAULT_TYPES`.

    The files that are made up lie in a temporary folder and are gone afterwards.
    """
    types = types or (DEFAULT_TYPES if model is None else ())
    on_progress("what this machine can do")
    limits = _limits(threads)
    measured = []
    for name in types:
        on_progress(f"making up a model in {name}")
        with _made_up(name) as made_up:
            measured.append(_measure_model(made_up, threads, on_progress))
        limits += _limits(threads)
    if model is not None:
        measured.append(_measure_model(model, threads, on_progress))
        limits += _limits(threads)
    return KernelsResult(reduce(Limits.or_better, limits), tuple(measured))


def _limits(threads: int | None) -> list[Limits]:
    """Measure the machine's bandwidth and arithmetic `LIMIT_TURNS` times."""
    from forge.backends.cpu.processor import usable_cpus
    from forge.bench.limits_worker import product_rate, read_bandwidth

    threads = threads or usable_cpus()
    return [
        Limits(read_bandwidth(ARRAY_BYTES, LIMIT_SECONDS, threads), product_rate(LIMIT_SECONDS, threads))
        for _ in range(LIMIT_TURNS)
    ]


@contextmanager
def _made_up(quantization: str) -> Iterator[Path]:
    from forge.model.synth import SHAPES, synth

    config = replace(SHAPES["qwen3-0.6b"], num_layers=SHAPE_LAYERS, vocab_size=VOCABULARY)
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        path = Path(folder) / f"random-{quantization.lower()}.gguf"
        synth(path, config, quantization, pure=True)
        yield path


def _measure_model(path: Path, threads: int | None, on_progress: Progress) -> Measured:
    from forge.backends.cpu.backend import CpuBackend
    from forge.bench.forge_worker import batch_of
    from forge.llm import LLM
    from forge.model.qwen3 import Qwen3

    size = measure_model(path, DEFAULT_KV_DTYPES["cpu"])
    longest = min(max(*ROWS, *CONTEXTS) + 1, size.max_context)
    llm = LLM(path, device="cpu", threads=threads, max_model_len=longest, max_num_seqs=1)
    blocks = -(-longest // BLOCK_SIZE)
    storage = llm.model.new_storage(llm.model.kv_layout(blocks, BLOCK_SIZE, llm.kv_dtype))
    works: list[Work] = []
    cases = [
        *(Case(f"rows{rows}", f"{rows} rows", "prefill", sequences=1, context=0, tokens=rows) for rows in ROWS),
        *(Case(f"context{before}", f"1 row after {before}", "decode", 1, before, tokens=1) for before in CONTEXTS),
    ]
    for case in (case for case in cases if case.length <= longest):
        token_ids = [ids[case.context :] for ids in case.token_ids(size.vocab_size, seed=1)]
        works.append((case, partial(llm.model.forward, batch_of(token_ids, case.context, blocks), storage)))
    every = _shortest_by_turn([work for _, work in works], lambda turn: on_progress(f"{model_name(path)}: {turn}"))
    passes, long_passes = [], []
    for (case, _), turns in zip(works, every, strict=True):
        needs, shortest = needs_of(case, size), min(turns)
        if case.context:
            held = case.context * size.kv_bytes
            long_passes.append(LongPass(case.context, held, needs.bytes_read, shortest * 1e3))
        else:
            spread = median(turns) / shortest
            passes.append(Pass(case.tokens, needs.bytes_read, needs.products, shortest, spread))
    assert isinstance(llm.model, Qwen3) and isinstance(llm.model.backend, CpuBackend)
    threads = llm.model.backend.threads
    return Measured(model_name(path), size, threads, tuple(passes), tuple(long_passes), last_cache_bytes())


def last_cache_bytes(caches: Path = CACHES) -> int:
    """Return the size of the processor's last-level cache from Linux; `CACHE_BYTES` elsewhere."""
    try:
        sizes = [int(path.read_text().strip().removesuffix("K")) << 10 for path in caches.glob("index*/size")]
    except (OSError, ValueError):
        sizes = []
    return max(sizes, default=CACHE_BYTES)


def _shortest_by_turn(works: Sequence[Callable[[], object]], on_progress: Progress) -> list[list[float]]:
    """Time `works` in turns, after a warm-up pass of each. Returns for each the seconds of every turn's shortest
    pass."""
    shortest: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for turn in range(ROUNDS):
        on_progress(f"{turn + 1} of {ROUNDS}")
        for work, turns in zip(works, shortest, strict=True):
            seconds: list[float] = []
            while sum(seconds) < ROUND_SECONDS:
                seconds.append(timed(work)[1])
            turns.append(min(seconds))
    return shortest


def kernels_object(result: KernelsResult) -> dict[str, Any]:
    """Return the experiment as facts. Rates are per second; `memory` and `arithmetic` are shares of the machine's
    limits."""
    limits = result.limits
    models = [
        {
            **as_object(model, "fits_in_cache", without=("size", "passes", "cache_bytes")),
            "weight_bytes": model.size.weight_bytes,
            "passes": [
                as_object(timed, *_OF_A_PASS, without=("seconds",))
                | as_object(timed.against(limits), without=_OF_A_LINE)
                for timed in model.passes
            ],
        }
        for model in result.models
    ]
    spreads = [timed.spread for model in result.models for timed in model.passes]
    return as_object(limits, "ridge") | {"models": models, "steady": max(spreads) < STEADY}


_OF_A_LINE = ("bytes_per_second", "products_per_second", "limit_seconds")
_OF_A_PASS = ("bytes_per_second", "products_per_second", "intensity", "ms", "ms_per_row")


def screen(result: KernelsResult) -> Iterator[Part]:
    """Draw the limits, a table per model, the roofline with every pass on it, and sentences on it."""
    limits = result.limits
    yield from (title(QUESTION), None, *sentences([limits_sentence(limits)]))
    shown = {
        "G": lambda value: two_digits(value / 1e9),
        "products": lambda value: rate(value / 1e9),
        "limit": lambda timed: f"{percent(timed.against(limits).share):>6}  {timed.against(limits).bound}",
    }
    columns = ["rows: {rows:count}", "ms: {ms:ms}", "ms per row: {ms_per_row:ms}", "GB/s: {bytes_per_second:G}"]
    columns += ["G products/s: {products_per_second:products}", "of the limit: {:limit}"]
    after = ["1 row after: {context:plural token}", "keys and values: {kv_bytes:size}"]
    after += ["with the weights: {bytes_read:size}", "ms: {ms:ms}"]
    for model in result.models:
        about = f"  {reads(model)}, {plural(model.threads, 'thread')}"
        yield from (None, Text.assemble((model.name, TITLE), (about, QUIET)))
        yield Table.of(model.passes, *columns, formats=shown, styles={5: ACCENT}, names=0, lefts=(5,))
        if model.long_passes:
            yield from (None, Table.of(model.long_passes, *after, names=0, lefts=(3,)))
    yield from (None, lambda width: picture(result, width), None)
    growth = map(growth_sentence, result.models)
    yield from sentences([*growth, *comparison_sentences(result.models), *cache_sentences(result)])


def picture(result: KernelsResult, width: int) -> list[Text]:
    """Draw the roofline with a mark for every pass."""
    points = []
    for index, model in enumerate(result.models):
        mark, style = _MARKS[index % len(_MARKS)], sequence_style(index)
        name = f"{model.name}, {model.passes[0].rows} to {model.passes[-1].rows} rows"
        points += [Point(mark, name, timed.intensity, timed.products_per_second, style) for timed in model.passes]
    return roofline(points, result.limits.bytes_per_second, result.limits.products_per_second, "products", width)


def limits_sentence(limits: Limits) -> str:
    memory, products = limits.bytes_per_second / 1e9, limits.products_per_second / 1e9
    return (
        f"This machine reads {memory:.1f} GB/s from memory and does {rate(products)} G int8 products/s: "
        f"{limits.ridge:.1f} products in the time of one byte."
    )


def reads(model: Measured) -> str:
    """Say how many weight bytes a pass reads: of a mixture of experts more, the more rows there are."""
    single, most = model.passes[0], model.passes[-1]
    if not model.size.expert_bytes or most is single:
        return f"every pass reads {size(single.bytes_read)} of weights"
    used = model.size.bytes_of_used_experts(most.rows) / model.size.expert_bytes
    return (
        f"a row reads {size(single.bytes_read)} of {size(model.size.weight_bytes)} of weights, {count(most.rows)} rows "
        f"{size(most.bytes_read)} ({percent(used)} of the experts)"
    )


def growth_sentence(model: Measured) -> str:
    """Say how long rows take alone and together."""
    single, most = model.passes[0], model.passes[-1]
    if most is single:
        return f"{model.name}: one row takes {ms(single.seconds * 1e3)} ms."
    together = most.seconds / single.seconds
    return (
        f"{model.name}: {count(most.rows)} rows take {together:.1f} times as long as one, so a row among many costs "
        f"{percent(together / most.rows)} of a row alone."
    )


def comparison_sentences(models: Sequence[Measured]) -> list[str]:
    """Compare each further model with the first, with one row and with many."""
    lines = []
    for model in models[1:]:
        first = models[0]
        fewer = first.passes[0].bytes_read / model.passes[0].bytes_read
        alone = first.passes[0].seconds / model.passes[0].seconds
        many = first.passes[-1].seconds / model.passes[-1].seconds
        lines.append(
            f"{model.name} has {fewer:.2f} times fewer bytes to read than {first.name}. With one row it is "
            f"{alone:.2f} times as fast, with {count(model.passes[-1].rows)} rows {many:.2f} times."
        )
    return lines


def cache_sentences(result: KernelsResult) -> list[str]:
    """Explain passes whose weights arrived faster than memory delivers."""
    memory = result.limits.bytes_per_second
    return [
        f"More than memory delivers: {model.name} stays in the processor's own cache between two passes."
        for model in result.models
        if model.fits_in_cache and model.passes[0].bytes_per_second > 1.1 * memory
    ]
