"""`forge bench speculation`: K = 1 to 8, a draft and a lookup, for one sequence and for batches.

Every figure is a ratio to plain decoding of the same requests in the same process, turn by turn: repetition i of every
case is measured in one round after one of plain decoding, and the ratio is the median of the rounds' ratios. The number
of draft tokens is fixed, so that each K shows what it costs. Whether the tokens are the same is checked for every turn.
"""

from collections.abc import Generator, Iterator, Sequence
from statistics import median
from typing import Annotated

from forge.bench import kit
from forge.bench.kit import Facts, Figure, Progress, QuickOption, option
from forge.cli import machine
from forge.cli.arguments import Takes
from forge.cli.run_control import create_llm, run_label
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.llm import LLM
from forge.speculation.setup import checked_mode
from forge.speculation.speculator import Speculator
from forge.trace.records import StepRecord
from forge.trace.speculation_summary import DecodeTime, SpeculationSummary
from forge.views.formatting import count, plural
from forge.views.palette import TITLE
from forge.views.screen import Part, Table, check, fill, title

BEGINNINGS = (
    "Once upon a time", "One day", "In a small village", "The old", "When the first snow fell", "Every evening",
    "A little fox", "By the lake", "Long ago", "On the hill", "The rabbit", "There was once", "Deep in the forest",
    "Early in the morning", "A girl named", "The miller",
)  # fmt: skip
SUMMARIES = (
    "alpha", "tokens_per_cycle", "predicted", "predicted_with_verification", "draft_cost", "verify_cost",
)  # fmt: skip
"""Figures of each turn; the median counts, None where nothing was proposed. predicted: (αK + 1) / (1 + K · t_draft /
t_target); with_verification: the same with the measured time of the verification."""


_Turn = tuple[list[StepRecord], list[tuple[int, ...]]]
"""One run of a batch: its steps, and the tokens of every sequence."""


def screen(facts: Facts) -> Iterator[Part]:
    """Yield every batch's table, narrow enough for 80 columns, with the best K of each proposer in bold; what plain
    decoding does beside it, and whether the tokens stayed the same."""
    yield from (title("How many tokens should be drafted at a time?"), facts["label"])
    figures = facts["figures"]
    columns = [": {proposer}", "K: {k}", "α: {alpha:.2f}", "tokens\nper\ncycle: {tokens_per_cycle:.2f}"]
    columns += ["speed-up: {speed_up:.2f} x", "least–most: {least:.2f}–{most:.2f}", "formula: {predicted:.2f}"]
    columns += ["with\nverify: {predicted_with_verification:.2f}", "tok/s: {tokens_per_second:,.0f}"]
    for batch in dict.fromkeys(figure["batch"] for figure in figures):
        of_batch = [figure for figure in figures if figure["batch"] == batch]
        best = {figure["proposer"]: figure for figure in sorted(of_batch, key=lambda figure: figure["speed_up"])}
        plain = count(round(of_batch[0]["plain_tokens_per_second"]))
        yield from (None, title(f"{plural(batch, 'sequence')}, {plain} tok/s without draft tokens"))
        bold = lambda figure, best=best: TITLE if figure in best.values() else ""  # noqa: E731
        yield Table.of(of_batch, *columns, row_style=bold, wraps=True)
    yield from (
        None,
        "formula: (αK + 1) / (1 + K · t_draft / t_target). With verify: the same with the measured time of the forward "
        "over K + 1 rows in place of the 1.",
    )
    differing = [figure for figure in figures if not figure["identical"]]
    named = "; ".join(fill("{proposer}, K {k}, batch {batch}", figure) for figure in differing)
    cases = f"in {plural(len(differing), 'case')}: {named}"
    same = "identical: every turn of every case gave the tokens of plain decoding"
    yield check(not differing, same, f"the tokens differ {cases}")


@kit.benchmark(screen)
def bench_speculation(
    say: Progress,
    engine: Annotated[EngineArgs, Takes("model kv device threads draft", kv="paged", speculate="draft")],
    speculate: Annotated[list[str] | None, option("draft or ngram; may be repeated.", default="both")] = None,
    k: Annotated[list[int] | None, option("Draft tokens at a time; may be repeated.", "--k", default="1 to 8")] = None,
    batch: Annotated[list[int] | None, option("Sequences; may be repeated.", default="1, 4, 16")] = None,
    tokens: Annotated[int | None, option("Of each sequence; 128 if not given.")] = None,
    reps: Annotated[int | None, option("Rounds; 5 if not given.")] = None,
    quick: QuickOption = False,
) -> Generator[Facts, None, None]:
    """Acceptance, tokens per cycle and speed-up by the number of draft tokens, beside what the formula predicts.

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
    kit.at_least_one(tokens=tokens, reps=reps)
    llm = create_llm(engine, speculate=None, draft=())
    facts = {"label": f"{run_label(llm)} · {machine.cpu_model()}", "tokens": tokens, "repetitions": reps}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    proposers = speculate or ["draft", "ngram"]
    figures: list[Facts] = []
    for size in batch or (1, 4, 16):
        prompts = list(BEGINNINGS[:size])
        turns: dict[tuple[str, int], list[tuple[_Turn, _Turn]]] = {}
        for round_number in range(reps + 1):  # the first warms up
            for proposer in proposers:
                llm.speculate_with("off")
                plain = _turn(llm, prompts, params)
                llm.speculate_with(proposer, engine.drafts)
                for number in k or range(1, 9):
                    say(f"batch {size}, {proposer}, K = {number}, round {round_number}")
                    assert isinstance(llm.engine.speculation, Speculator)
                    llm.engine.speculation.fix(number)
                    turns.setdefault((proposer, number), []).append((plain, _turn(llm, prompts, params)))
        llm.speculate_with("off")
        for (proposer, number), pairs in turns.items():
            identical = all(plain[1] == drafted[1] for plain, drafted in pairs)
            figure = {"proposer": proposer, "k": number, "batch": size, **_figure(pairs[1:]), "identical": identical}
            figures.append(figure)
        yield facts | {"figures": figures, "identical": all(figure["identical"] for figure in figures)}


def _turn(llm: LLM, prompts: list[str], params: SamplingParams) -> _Turn:
    started = llm.start(prompts, params)
    try:
        records = list(started)
    except BaseException:
        started.abort()
        raise
    return records, [output.outputs[0].token_ids for output in started.outputs]


def _figure(turns: Sequence[tuple[_Turn, _Turn]]) -> Facts:
    """Summarize a case: medians over the rounds."""
    times = [
        (before, after)
        for (plain, _), (drafted, _) in turns
        if (before := DecodeTime.of(plain)) and (after := DecodeTime.of(drafted))
    ]
    speed_up = Figure.of([before.ms_per_token / after.ms_per_token for before, after in times])
    summaries = [SpeculationSummary.of(plain, drafted) for (plain, _), (drafted, _) in turns]
    columns = {name: [getattr(summary, name) for summary in summaries if summary is not None] for name in SUMMARIES}
    return {
        **{name: median(values) if values else None for name, values in columns.items()},
        "speed_up": speed_up.median,
        "least": speed_up.low,
        "most": speed_up.high,
        "tokens_per_second": median(after.tokens_per_second for _, after in times),
        "plain_tokens_per_second": median(before.tokens_per_second for before, _ in times),
    }
