"""1. A forward pass, token by token, and where its time goes.

[dim]forge naive --only run "Once upon a time" 32[/dim]
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.options import OutputArgs
from forge.cli.run_control import RepeatedRun, StepSubscriber, drive, exit_status, run_label
from forge.engine_args import EngineArgs
from forge.views.charts import bar, sparkline
from forge.views.formatting import count, ms, percent, plural
from forge.views.generation import run_parts, watching
from forge.views.json_output import climb_object, run_object
from forge.views.palette import ACCENT
from forge.views.report import Report
from forge.views.screen import Part, Table, leads_on, report, sentences, title
from forge.views.summary import Forward, RunResult
from forge.views.terminal import open_console

if TYPE_CHECKING:
    from forge.model.backend import OperationTime

MAX_TOKENS = 128
"""Enough for the climb to be more than the machine's unrest."""
QUESTION = "What does each token cost when nothing is kept?"
LEADS_ON = "Keeping keys and values saves the repeated work. Both in one picture:\n  forge compare --kv off vs basic"
_BAR = 28


@experiment()
def naive(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = MAX_TOKENS,
    *,
    engine: Annotated[EngineArgs, Takes("model device threads", kv="off")],
    output: Annotated[OutputArgs, Takes("trace step")],
) -> Experiment:
    subscriber = StepSubscriber(output.trace, output.step)
    return Experiment(lambda: _measure(options.read_prompt(prompt), max_tokens, engine, subscriber), subscriber.is_on)


def _measure(prompt: str, max_tokens: int, engine: EngineArgs, subscriber: StepSubscriber) -> Report:
    run = RepeatedRun.of(engine, prompt, max_tokens, subscriber)
    llm, result = run.llm, run.result
    if not result.interrupted:  # once more, with a clock around every operation, which takes time of its own
        llm.time_operations()
        with watching(open_console(), run_label(llm), prompt) as view:
            drive(llm, llm.start([prompt], run.params), run.params, view.step)
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
    if not forwards:
        return None
    mean_tokens = sum(forward.tokens for forward in forwards) / len(forwards)
    mean_ms = sum(forward.ms for forward in forwards) / len(forwards)
    spread = sum((forward.tokens - mean_tokens) ** 2 for forward in forwards)
    if not spread:
        return None
    return sum((forward.tokens - mean_tokens) * (forward.ms - mean_ms) for forward in forwards) / spread


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
