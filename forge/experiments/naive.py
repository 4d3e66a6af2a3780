"""1. A forward pass, token by token, and where its time goes.

[dim]forge naive --only run "Once upon a time" 32[/dim]
[dim]forge naive --only run --heads "Once upon a time" 10[/dim]
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import linear_regression, mean
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.options import OutputArgs
from forge.cli.run_control import StepSubscriber, create_llm, drive, exit_status, run_label
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.experiments.repeated_run import RepeatedRun
from forge.model.catalog import is_hash_model
from forge.views.chapter_run import run_parts
from forge.views.charts import bar, sparkline
from forge.views.formatting import count, ms, percent, plural
from forge.views.generation import LiveGeneration
from forge.views.json_output import climb_object, picked, run_object
from forge.views.palette import ACCENT, QUIET, TITLE, sequence_style
from forge.views.screen import Part, Report, Table, leads_on, report, sentences, title
from forge.views.summary import Forward, RunResult
from forge.views.terminal import open_console
from forge.views.text import quoted

if TYPE_CHECKING:
    from forge.model.operation_time import OperationTime

MAX_TOKENS = 128
"""Enough for the climb to be more than the machine's unrest."""
QUESTION = "What does each token cost when nothing is kept?"
LEADS_ON = "Keeping keys and values saves the repeated work. Both in one picture:\n  forge compare --kv off vs basic"
_BAR = 28


@experiment()
def naive(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = MAX_TOKENS,
    heads: Annotated[bool, typer.Option("--heads", help="Show what each head of a layer looks at.")] = False,
    *,
    engine: Annotated[EngineArgs, Takes("model device threads", kv="off")],
    output: Annotated[OutputArgs, Takes("trace step")],
) -> Experiment:
    if heads and (output.trace is not None or output.step):
        raise UsageError("--heads is about one forward pass: leave --trace and --step out")
    subscriber = StepSubscriber(output.trace, output.step)
    if heads:
        return Experiment(lambda: heads_report(options.read_prompt(prompt), max_tokens, engine), alone=True)
    return Experiment(lambda: _measure(options.read_prompt(prompt), max_tokens, engine, subscriber), subscriber.is_on)


def _measure(prompt: str, max_tokens: int, engine: EngineArgs, subscriber: StepSubscriber) -> Report:
    run = RepeatedRun.of(engine, prompt, max_tokens, subscriber)
    llm, result = run.llm, run.result
    if not result.interrupted:  # once more, with a clock around every operation, which takes time of its own
        llm.time_operations()
        with LiveGeneration(open_console(), run_label(llm), prompt) as view:
            drive(llm, llm.start([prompt], run.params), view.step)
    operations = llm.operation_times()
    facts = naive_object(result, operations, llm.tokenizer.token_text) | {"runs": run.runs}
    return report(facts, lambda: screen(result, operations, prompt), exit_status(result))


@dataclass(frozen=True)
class Share:
    """An operation or a layer, with its share of the total time."""

    name: str
    ms: float
    calls: int
    share: float


def naive_object(result: RunResult, operations: "Sequence[OperationTime]", token_text) -> dict[str, Any]:
    """Return the experiment as facts: the run, its slope, the repeated work, and the time per operation."""
    shares = shares_by_operation(operations)
    layers = [share for share in shares_by_layer(operations) if share.name != "outside"]
    new = distinct_tokens(result)
    return run_object(result, token_text) | {
        "num_forwards": len(result.forwards),
        "prompt_tokens": len(result.output.prompt_token_ids),
        "distinct_tokens": new,
        "repeated_share": 1 - new / result.tokens_computed if result.tokens_computed else None,
        **climb_object(result.forwards),
        "slope_ms": slope(result.forwards),
        "matrices_share": matrices_share(shares),
        "attention_share": attention_share(shares),
        "layers_share": sum(layer.share for layer in layers),
        "layers_spread": layers_spread(layers),
        "operations": [{"operation": s.name, "ms": s.ms, "calls": s.calls, "share": s.share} for s in shares],
        "layers": [{"layer": int(layer.name), "ms": layer.ms, "share": layer.share} for layer in layers],
    }


def screen(result: RunResult, operations: "Sequence[OperationTime]", prompt: str) -> Iterator[Part]:
    """Draw the whole experiment: the text, the climbing chart, time by operation, time by layer."""
    yield from (title(QUESTION), None, *run_parts(result, prompt, climb_sentences(result)))
    if operations:
        shares = shares_by_operation(operations)
        bars = {"bar": lambda value: bar(value, shares[0].ms, _BAR)}
        columns = ["operation: {name}", "ms: {ms:ms}", "calls: {calls:count}", "share: {share:percent}", ": {ms:bar}"]
        yield from (None, Table.of(shares, *columns, formats=bars, styles={4: ACCENT}, lefts=(4,)))
        yield from sentences([operations_sentence(shares)])
        yield from (None, *_layers(shares_by_layer(operations)))
    yield leads_on(LEADS_ON)


def climb_sentences(result: RunResult) -> list[str]:
    """Say in sentences what the chart shows in this run."""
    forwards = result.forwards
    if len(forwards) < 3:
        return ["Too few forwards to see a slope: ask for more tokens."]
    second, last = forwards[1], forwards[-1]
    new, total, rise = distinct_tokens(result), result.tokens_computed, slope(forwards)
    rising = f" Each token in the sequence adds {ms(rise)} ms to every forward after it." if rise and rise > 0 else ""
    return [
        f"Forward {second.number} computed {plural(second.tokens, 'token')} in {ms(second.ms)} ms, forward "
        f"{last.number} computed {count(last.tokens)} in {ms(last.ms)} ms: {last.ms / second.ms:.1f} times as long, "
        f"for one new token each.{rising}",
        f"{count(total)} tokens went through the model where {count(new)} different ones exist: "
        f"{percent((total - new) / total)} of the work had been done before.",
    ]


def shares_by_operation(operations: "Iterable[OperationTime]") -> list[Share]:
    """Sum the time per operation over all layers, longest first."""
    return sorted(_shares((entry.operation, entry) for entry in operations), key=lambda share: -share.ms)


def shares_by_layer(operations: "Iterable[OperationTime]") -> list[Share]:
    """Sum the time per layer, in order; the time outside the layers comes last."""
    ordered = sorted(operations, key=lambda entry: entry.layer if entry.layer >= 0 else 1 << 30)
    return _shares((str(entry.layer) if entry.layer >= 0 else "outside", entry) for entry in ordered)


def _shares(named: "Iterable[tuple[str, OperationTime]]") -> list[Share]:
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, entry in named:
        times[name] += entry.ms
        calls[name] += entry.calls
    total = sum(times.values()) or 1.0
    return [Share(name, times[name], calls[name], times[name] / total) for name in times]


def distinct_tokens(result: RunResult) -> int:
    """Count the tokens that must pass the model at least once: the prompt, and all but the last of the output."""
    return result.forwards[0].tokens + len(result.forwards) - 1 if result.forwards else 0


def slope(forwards: Sequence[Forward]) -> float | None:
    """Return milliseconds per token by least squares; None if all forwards have equally many tokens."""
    tokens, times = [forward.tokens for forward in forwards], [forward.ms for forward in forwards]
    return linear_regression(tokens, times).slope if len({*tokens}) > 1 else None


def operations_sentence(shares: Sequence[Share]) -> str:
    """Say which operations take the time."""
    matrices, attention = percent(matrices_share(shares)), percent(attention_share(shares))
    return (
        f"{matrices} of the time is matrix products, {attention} attention over the sequence. Every forward after the "
        "first runs them again for tokens whose result is already known."
    )


def matrices_share(shares: Sequence[Share]) -> float:
    """Return the share of the time spent in products with a weight matrix."""
    return sum(share.share for share in shares if MATRICES.intersection(share.name.split(", ")))


def attention_share(shares: Sequence[Share]) -> float:
    return sum(share.share for share in shares if share.name == "attention")


MATRICES = frozenset(
    ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output head", "output"]
)
"""Operations that are products with a weight matrix, as the clock names them; fused ones are named `a, b`."""


def _layers(shares: Sequence[Share]) -> Iterator[Part]:
    layers = [share for share in shares if share.name != "outside"]
    outside = sum(share.ms for share in shares if share.name == "outside")
    if layers:
        times = [share.ms for share in layers]
        label, between = f"layers 0 to {len(layers) - 1}  ", f"  {ms(min(times))} to {ms(max(times))} ms each"
        strip = lambda width: sparkline(times, max(times), max(8, width - len(label) - 26))  # noqa: E731
        yield lambda width: [Text.assemble(label, (strip(width), ACCENT), between)]
    told = f"outside the layers (embedding, last norm, output head)  {ms(outside)} ms"
    yield from sentences([told, layers_sentence(layers, outside)])


def layers_spread(layers: Sequence[Share]) -> float:
    """Return the slowest layer's time over the fastest's; 1 for a model without layers."""
    times = [layer.ms for layer in layers] or [1.0]
    return max(times) / max(min(times), 1e-9)


def layers_sentence(layers: Sequence[Share], outside: float) -> str:
    """Say whether the layers take equally long."""
    if not layers:
        return "No layer was timed."
    inside = sum(share.ms for share in layers)
    spread = layers_spread(layers)
    alike = "the layers cost alike" if spread < 1.25 else f"the slowest layer takes {spread:.1f} times the fastest"
    return f"{percent(inside / (inside + outside))} of the time is spent in the layers, and {alike}."


TOKENS_SHOWN, _NAME = 14, 12
"""Tokens of the picture, the last ones, and characters of their names."""
SHADES = " ░▒▓█"
"""The characters of weights below a fifth, below two fifths, …"""
HEADS_QUESTION = "What does each head look at?"


@dataclass(frozen=True)
class HeadsResult:
    """The attention weights of one layer: that in which the heads differ most."""

    model: str
    layer: int
    pieces: tuple[str, ...]
    weights: np.ndarray
    """`[query heads, tokens, tokens]`: what each token takes of itself and of each token before it."""
    num_kv_heads: int

    def apart(self, first: int, second: int) -> float:
        """Return the share of their weights that two heads put on different tokens, on average over all tokens."""
        return float(abs(self.weights[first] - self.weights[second]).sum(axis=-1).mean() / 2)

    @property
    def group(self) -> int:
        """The query heads that share a KV head."""
        return len(self.weights) // self.num_kv_heads


def heads_report(prompt: str, max_tokens: int, engine: EngineArgs) -> Report:
    """Generate a text, and look at its attention weights in one pass of the reference backend over all of it."""
    if is_hash_model(str(engine.model)):
        raise UsageError("the hash model has no attention heads: --heads needs a model with layers")
    llm = create_llm(engine, kv="basic")
    [output] = llm.generate([prompt], SamplingParams(max_tokens=max_tokens))
    token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    reference = create_llm(engine, device="reference", threads=None)
    layers = attention_of(reference.model, llm.kv_dtype, token_ids)
    pieces, kv_heads = tuple(map(llm.tokenizer.token_text, token_ids)), llm.kv_layout.num_kv_heads
    every = (HeadsResult(llm.model_name, index, pieces, layer, kv_heads) for index, layer in enumerate(layers))
    result = max(every, key=lambda result: mean(_distances(result, range(len(result.weights))) or [0.0]))
    return report(heads_object(result), lambda: heads_screen(result))


def attention_of(model: Any, kv_dtype: str, token_ids: list[int]) -> list[np.ndarray]:
    """Return each layer's weights `[query heads, tokens, tokens]`, from one pass of the reference over the tokens."""
    from forge.backends.reference import ReferenceOperations, attention_weights
    from forge.bench.cases import BLOCK_SIZE
    from forge.bench.forge_worker import batch_of

    layers: list[np.ndarray] = []

    class WatchedOperations(ReferenceOperations):
        """The reference's operations, which keep each layer's attention weights on their way."""

        def attention(self, q, storage, layer, batch):  # type: ignore[no-untyped-def]
            keys, _ = storage.gather(layer, batch.block_tables[0], len(q))
            rows = q.reshape(len(q), keys.shape[1], -1, keys.shape[2])  # [tokens, KV heads, query heads of each, dim]
            weights = np.zeros((keys.shape[1], rows.shape[2], len(q), len(q)), np.float32)
            for row, head in np.ndindex(rows.shape[:2]):
                weights[head, :, row, : row + 1] = attention_weights(rows[row, head], keys[: row + 1, head])
            layers.append(weights.reshape(-1, len(q), len(q)))
            return super().attention(q, storage, layer, batch)

    blocks = -(-len(token_ids) // BLOCK_SIZE)
    storage = model.new_storage(model.kv_layout(blocks, BLOCK_SIZE, kv_dtype))
    model.run_layers(WatchedOperations(), batch_of([token_ids], 0, blocks), storage)
    return layers


def _distances(result: HeadsResult, heads: Sequence[int]) -> list[float]:
    return [result.apart(*pair) for pair in combinations(heads, 2)]


def heads_object(result: HeadsResult) -> dict[str, Any]:
    """Return the picture as facts: of each head the weights, and how much of them lies on the token before."""
    groups = [range(first, first + result.group) for first in range(0, len(result.weights), result.group)]
    within = [distance for group in groups for distance in _distances(result, group)]
    return {
        **picked(result, "model", "layer", "num_kv_heads"),
        "tokens": list(result.pieces),
        "apart_in_group": mean(within) if within else None,
        "heads": [
            {
                "head": head,
                "kv_head": head // result.group,
                "before": float(weights.diagonal(-1).mean()) if len(weights) > 1 else None,
                "weights": weights.tolist(),
            }
            for head, weights in enumerate(result.weights)
        ],
    }


def heads_screen(result: HeadsResult) -> Iterator[Part]:
    """Draw a triangle for each head: a line for each token, a column for each token that it looks at."""
    yield title(HEADS_QUESTION)
    yield f"{result.model}, layer {result.layer}: of all layers that in which the heads differ most"
    yield None
    yield lambda width: _triangles(result, width)
    yield None
    legend = "  ".join(f"{character} from {index * 20} %" for index, character in enumerate(SHADES) if index)
    earlier = max(0, len(result.pieces) - TOKENS_SHOWN)
    left_out = f" {plural(earlier, 'earlier token')} not shown." if earlier else ""
    yield f"A line for each token, a column for each token that it looks at: {legend}.{left_out}"


def _triangles(result: HeadsResult, width: int) -> Iterator[Text]:
    """Yield the lines of as many heads as fit beside one another."""
    tokens = range(max(0, len(result.pieces) - TOKENS_SHOWN), len(result.pieces))
    names = [quoted(result.pieces[token]) for token in tokens]
    names = [name if len(name) <= _NAME else f"{name[: _NAME - 1]}…" for name in names]
    edge, column = max(map(len, names)), max(len(tokens), len("KV head 0")) + 3
    heads = range(min(len(result.weights), max(1, (width - edge) // column)))

    def line(name: str, cells: "Iterable[str]", style: str = "") -> Text:
        coloured = [
            (f"{cell:<{column}}", f"{style} {sequence_style(head // result.group)}")
            for head, cell in zip(heads, cells, strict=True)
        ]
        text = Text.assemble((f"{name:>{edge}}  ", QUIET), *coloured)
        text.rstrip()
        return text

    yield line("", (f"head {head}" for head in heads), TITLE)
    yield line("", (f"KV head {head // result.group}" for head in heads))
    for row, name in zip(tokens, names, strict=True):
        weights = result.weights[:, row, tokens.start : row + 1]
        yield line(name, ("".join(map(shade, weights[head])) for head in heads))


def shade(weight: float) -> str:
    return SHADES[min(int(weight * len(SHADES)), len(SHADES) - 1)]
