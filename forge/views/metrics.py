"""The metrics block: the figures of a run in words, as facts that flow over a line or stand one to a line."""

from collections.abc import Sequence

from rich.text import Text

from forge.trace.records import Spread
from forge.views.figures import count, ms, rate, size
from forge.views.palette import QUIET
from forge.views.summary import RunLabel, RunResult

Fact = tuple[str, str]
"""A name and its figure, unit included."""


def run_facts(result: RunResult) -> list[Fact]:
    """What a run cost, in the order in which a reader asks."""
    return [
        ("time to first token", with_unit(ms(result.time_to_first_token_ms), "ms")),
        ("decode", with_unit(rate(result.decode_tokens_per_second), "tok/s")),
        ("forwards", count(len(result.records))),
        ("tokens computed", count(result.tokens_computed)),
        ("KV held", size(result.kv_bytes_held)),
        ("ended", result.ending),
    ]


def spread_text(spread: Spread | None) -> str:
    """`min 0.6  median 0.6  max 1.9  mean 0.7  (n=32)`."""
    if spread is None:
        return "no forward ran"
    figures = [f"{name} {ms(getattr(spread, attribute))}" for name, attribute in _SPREAD]
    return "  ".join([*figures, f"(n={spread.count})"])


_SPREAD = (("min", "minimum"), ("median", "median"), ("max", "maximum"), ("mean", "mean"))


def with_unit(figure: str, unit: str) -> str:
    return f"{figure} {unit}" if figure[-1].isdigit() else figure


def flowing(facts: Sequence[Fact], width: int) -> list[Text]:
    """Facts side by side, as many to a line as fit in `width`; a fact is never broken."""
    lines: list[Text] = []
    for name, figure in facts:
        fact = Text.assemble((f"{name} ", QUIET), figure)
        if lines and lines[-1].cell_len + 3 + fact.cell_len <= width:
            lines[-1].append("   ").append_text(fact)
        else:
            lines.append(fact)
    return lines


def metrics_lines(result: RunResult, width: int) -> list[Text]:
    """The block under a chart on a terminal."""
    spread = Text.assemble(("per forward ms: ", QUIET), spread_text(result.spread))
    return [*flowing(run_facts(result), width), spread]


def plain_metrics(result: RunResult) -> list[str]:
    """The block in a pipe: one fact to a line, names padded to one column."""
    facts = [*label_facts(result.label), *run_facts(result), ("per forward ms", spread_text(result.spread))]
    if result.output.outputs[0].metrics.num_output_tokens:
        facts.append(("seed", str(result.output.seed)))
    widest = max(len(name) for name, _ in facts)
    return [f"{name:<{widest}}  {figure}" for name, figure in facts]


def label_facts(label: RunLabel) -> list[Fact]:
    return [
        ("model", label.model),
        ("kv mode", label.kv),
        ("device", f"{label.device} ({label.device_description})"),
    ]
