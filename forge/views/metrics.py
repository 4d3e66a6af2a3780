"""The metrics block: the figures of a run in words, as facts that flow over a line or stand one to a line."""

from collections.abc import Sequence

from rich.text import Text

from forge.trace.records import StepRecord
from forge.trace.speculation_summary import draft_totals, undrafted_counts
from forge.views.formatting import count, formatted, ms, percent, plural, size
from forge.views.palette import GOOD, QUIET, TROUBLE
from forge.views.summary import RunLabel, RunResult, Spread
from forge.views.terminal import heading
from forge.views.text import one_line

Fact = tuple[str, str]
"""A name and its figure, unit included."""


def verdict(identical: bool, same: str, other: str) -> Text:
    """Format a verdict: `✓ identical: 72 tokens of 4 requests`, or `✗ the answers differ`."""
    return Text.assemble(("✓ identical", GOOD), f": {same}") if identical else Text(f"✗ {other}", TROUBLE)


def run_facts(result: RunResult) -> list[Fact]:
    """Return what a run cost, in the order in which a reader asks."""
    seed = [("seed", str(result.output.seed))] if result.sampled else []
    return [
        ("time to first token", formatted(result.output.metrics.time_to_first_token_ms, "ms ms")),
        ("decode", formatted(result.decode_tokens_per_second, "rate tok/s")),
        ("forwards", count(len(result.records))),
        ("tokens computed", count(result.tokens_computed)),
        ("KV held", size(result.kv_bytes_held)),
        ("ended", result.ending),
        *seed,
        *draft_facts(result.records),
    ]


def draft_facts(records: Sequence[StepRecord]) -> list[Fact]:
    """List for each proposer how many of its draft tokens were accepted, by position, and the time that they took. Then
    the decodes without draft tokens, with the reasons."""
    drafts, facts = draft_totals(record.cycles for record in records), []
    for draft in drafts:
        positions = " ".join(f"{accepted / proposed * 100:.0f}" for accepted, proposed in draft.by_position)
        name, accepted = one_line(draft.name), f"{count(draft.accepted)} of {count(draft.proposed)} accepted"
        share = f"{percent(draft.acceptance)}; by position {positions}"
        facts.append((f"{name} drafted", f"{accepted} ({share}), {ms(draft.ms)} ms"))
        if len(drafts) > 1:
            gained = f"{plural(draft.gained, 'token')} beyond the other"
            facts.append((f"{name} won", f"{count(draft.won)} of {count(draft.cycles)} cycles, {gained}"))
    plain = [f"{count(number)} {_UNDRAFTED[reason]}" for reason, number in undrafted_counts(records).items()]
    return [*facts, ("plain decodes", ", ".join(plain))] if plain else facts


_UNDRAFTED = {
    "measures": "to know what one takes",
    "loses": "because draft tokens did not pay",
    "cannot_win": "because even accepted draft tokens would not pay",
    "no_proposal": "without a proposal",
    "pauses": "in a pause after no proposals",
    "no_room": "without room for draft tokens",
    "last_token": "for the last token",
    "not_wanted": "without proposers",
}
"""Why a decode had no draft tokens, as `undrafted_counts` calls it."""


def spread_text(spread: Spread | None) -> str:
    """Format a spread: `min 0.6  median 0.6  max 1.9  mean 0.7  (n=32)`."""
    if spread is None:
        return "no forward ran"
    *times, number = spread._asdict().items()
    return "  ".join([*(f"{name} {ms(value)}" for name, value in times), f"(n={number[1]})"])


def flowing(facts: Sequence[Fact], width: int) -> list[Text]:
    """Lay out facts side by side, as many to a line as fit in `width`; a fact is never broken."""
    lines: list[Text] = []
    for name, figure in facts:
        fact = Text.assemble((f"{name} ", QUIET), figure)
        if lines and lines[-1].cell_len + 3 + fact.cell_len <= width:
            lines[-1].append("   ").append_text(fact)
        else:
            lines.append(fact)
    return lines


def metrics_lines(result: RunResult, width: int) -> list[Text]:
    """Return the block under a chart on a terminal; says what ran where the chart's heading had no room for it."""
    spread = Text.assemble(("per forward ms: ", QUIET), spread_text(result.spread))
    label = str(result.label)
    unsaid = [] if label in chart_heading(result.label, width).plain else [Text(label, QUIET)]
    return [*flowing(run_facts(result), width), spread, *unsaid]


def chart_heading(label: RunLabel, width: int) -> Text:
    """Return what the chart shows on the left; what ran on the right, as far as there is room."""
    short = f"kv {label.kv} · {label.device} · {label.model}"
    return heading("milliseconds per forward", "", (str(label), short), width)


def plain_metrics(result: RunResult) -> list[str]:
    """Return the block in a pipe: one fact to a line, names padded to one column."""
    label = result.label
    named = [("model", label.model), ("kv mode", label.kv), ("device", f"{label.device} ({label.device_description})")]
    facts = [*named, *run_facts(result), ("per forward ms", spread_text(result.spread))]
    widest = max(len(name) for name, _ in facts)
    return [f"{name:<{widest}}  {figure}" for name, figure in facts]
