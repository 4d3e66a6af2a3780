"""`forge bench speculation`: K = 1 to 8, a draft and a lookup, for one sequence and for batches.

Every figure is a ratio to plain decoding of the same requests in the same process, turn by turn: repetition i of every
case is measured in one round after one of plain decoding, and the ratio is the median of the rounds' ratios. The number
of draft tokens is fixed, so that each K shows what it costs. Whether the tokens are the same is checked for every turn.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

from forge.cli import machine, options
from forge.cli.arguments import Takes, command
from forge.cli.run_control import Found, load_model, run_label
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.experiments.bench.options import QuickOption, option
from forge.experiments.bench.results import Facts, Figure, Progress, last_of, ratios, shown
from forge.experiments.bench.tables import Part, Table, title, verdict
from forge.llm import LLM
from forge.speculation.setup import checked_mode
from forge.speculation.speculator import Speculator
from forge.trace.records import StepRecord
from forge.trace.speculation_summary import DecodeTime, SpeculationSummary
from forge.views.formatting import NOTHING, count, plural
from forge.views.progress import progress_line

BEGINNINGS = (
    "Once upon a time", "One day", "In a small village", "The old", "When the first snow fell", "Every evening",
    "A little fox", "By the lake", "Long ago", "On the hill", "The rabbit", "There was once", "Deep in the forest",
    "Early in the morning", "A girl named", "The miller",
)  # fmt: skip
PROPOSERS = ("draft", "ngram")
BATCHES = (1, 4, 16)
GUESSES = tuple(range(1, 9))
SUMMARIES = (
    "alpha", "tokens_per_cycle", "predicted", "predicted_with_verification", "draft_cost", "verify_cost",
)  # fmt: skip
"""Of each turn; the median counts, None where nothing was proposed. predicted: (αK + 1) / (1 + K · t_draft / t_target);
with_verification: the same with the measured time of the verification."""


@command
def bench_speculation(
    engine: Annotated[EngineArgs, Takes("model kv device threads draft", kv="paged")],
    speculate: Annotated[list[str] | None, option("draft or ngram; may be repeated.", default="both")] = None,
    k: Annotated[list[int] | None, option("Guesses at a time; may be repeated.", "--k", default="1 to 8")] = None,
    batch: Annotated[list[int] | None, option("Sequences; may be repeated.", default="1, 4, 16")] = None,
    tokens: Annotated[int | None, option("Of each sequence; 128 if not given.")] = None,
    reps: Annotated[int | None, option("Rounds; 5 if not given.")] = None,
    quick: QuickOption = False,
    json: options.JsonOption = False,
) -> Found:
    """Acceptance, tokens per cycle and speed-up by the number of guesses, beside what the formula predicts.

    [dim]forge bench speculation --batch 1 --k 2 --k 4[/dim]
    """
    for mode in speculate or ():
        checked_mode(mode, 1)
    for number in k or ():
        checked_mode("off", number)
    for size in batch or ():
        if not 1 <= size <= len(BEGINNINGS):
            raise UsageError(f"--batch takes 1 to {len(BEGINNINGS)} sequences, got {size}")
    tokens = (32 if quick else 128) if tokens is None else tokens
    reps = (1 if quick else 5) if reps is None else reps
    llm = load_model(engine)
    llm.engine.report_probabilities = False
    facts = {"label": f"{run_label(llm)} · {machine.cpu_model()}", "tokens": tokens, "repetitions": reps}
    cases = [(name, number) for name in speculate or PROPOSERS for number in k or GUESSES]
    with progress_line() as progress:
        facts |= last_of(run(llm, cases, batch or BATCHES, tokens, reps, engine.drafts, progress))
    return shown(facts, screen(facts), json)


@dataclass(frozen=True)
class _Turn:
    """One run of a batch."""

    records: list[StepRecord]
    tokens: list[tuple[int, ...]]


def run(
    llm: LLM,
    cases: Sequence[tuple[str, int]],
    batches: Sequence[int],
    num_tokens: int,
    repetitions: int,
    drafts: Sequence[str | Path],
    on_progress: Progress,
) -> Generator[Facts, None, None]:
    """Measure each (proposer, K) batch by batch, yielding the figures so far when a batch is done. `llm` must have
    nothing else to do."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    figures: list[Facts] = []
    for batch in batches:
        prompts = list(BEGINNINGS[:batch])
        turns: dict[tuple[str, int], list[tuple[_Turn, _Turn]]] = {case: [] for case in cases}
        identical = dict.fromkeys(cases, True)
        for round_number in range(repetitions + 1):  # the first warms up
            for proposer in dict.fromkeys(name for name, _ in cases):
                llm.speculate_with("off")
                plain = _turn(llm, prompts, params)
                llm.speculate_with(proposer, drafts)
                for case in (case for case in cases if case[0] == proposer):
                    on_progress(f"batch {batch}, {proposer}, K = {case[1]}, round {round_number}")
                    assert isinstance(llm.engine.speculation, Speculator)
                    llm.engine.speculation.fix(case[1])
                    turn = _turn(llm, prompts, params)
                    identical[case] &= turn.tokens == plain.tokens
                    if round_number:
                        turns[case].append((plain, turn))
        llm.speculate_with("off")
        for proposer, k in cases:
            figure = {"proposer": proposer, "k": k, "batch": batch, **_figure(turns[proposer, k])}
            figures.append(figure | {"identical": identical[proposer, k]})
        yield {"figures": figures}


def _turn(llm: LLM, prompts: list[str], params: SamplingParams) -> _Turn:
    started = llm.start(prompts, params)
    try:
        records = list(started)
    except BaseException:
        started.abort()
        raise
    return _Turn(records, [output.outputs[0].token_ids for output in started.outputs])


def _figure(turns: Sequence[tuple[_Turn, _Turn]]) -> Facts:
    """What came of a case: medians over the rounds."""
    times = [
        (before, after)
        for plain, turn in turns
        if (before := DecodeTime.of(plain.records)) and (after := DecodeTime.of(turn.records))
    ]
    speed_up = Figure.of(ratios([one.ms_per_token for one, _ in times], [one.ms_per_token for _, one in times]))
    summaries = [SpeculationSummary.of(plain.records, turn.records) for plain, turn in turns]
    found = {name: [getattr(one, name) for one in summaries if one is not None] for name in SUMMARIES}
    return {
        **{name: median(values) if values else None for name, values in found.items()},
        "speed_up": speed_up.median,
        "least": speed_up.low,
        "most": speed_up.high,
        "tokens_per_second": median(after.tokens_per_second for _, after in times),
        "plain_tokens_per_second": median(before.tokens_per_second for before, _ in times),
    }


def screen(facts: Facts) -> Iterator[Part]:
    """Every batch's table, what plain decoding does beside it, and whether the tokens stayed the same."""
    yield from (title("How many tokens should be guessed at a time?"), facts["label"])
    figures = facts["figures"]
    for batch in dict.fromkeys(one["batch"] for one in figures):
        own = [one for one in figures if one["batch"] == batch]
        plain = count(round(own[0]["plain_tokens_per_second"]))
        yield from (None, title(f"{plural(batch, 'sequence')}, {plain} tok/s without guesses"), _table(own))
    yield from (
        None,
        "formula: (αK + 1) / (1 + K · t_draft / t_target). With verify: the same with the measured time of the forward "
        "over K + 1 rows in place of the 1.",
    )
    differing = [f"{one['proposer']}, K {one['k']}, batch {one['batch']}" for one in figures if not one["identical"]]
    cases = f"in {plural(len(differing), 'case')}: {'; '.join(differing)}"
    same = "identical: every turn of every case gave the tokens of plain decoding"
    yield verdict(not differing, same, f"the tokens differ {cases}")


def _table(figures: Sequence[Facts]) -> Table:
    """Narrow enough for 80 columns. The best K of each proposer is bold."""

    def number(value: float | None) -> str:
        return NOTHING if value is None else f"{value:.2f}"

    best: dict[str, Facts] = {}
    for one in figures:
        if one["speed_up"] > best.setdefault(one["proposer"], one)["speed_up"]:
            best[one["proposer"]] = one
    rows = [
        (
            one["proposer"],
            str(one["k"]),
            number(one["alpha"]),
            number(one["tokens_per_cycle"]),
            f"{one['speed_up']:.2f} x",
            f"{one['least']:.2f}–{one['most']:.2f}",
            number(one["predicted"]),
            number(one["predicted_with_verification"]),
            count(round(one["tokens_per_second"])),
        )
        for one in figures
    ]
    bold = [
        [title(cell) if one in best.values() else cell for cell in row] for row, one in zip(rows, figures, strict=True)
    ]
    headings = ("", "K", "α", "tokens\nper\ncycle", "speed-up", "least–most", "formula", "with\nverify", "tok/s")
    return Table(headings, bold, wraps=True)
