"""7. Guess, verify, keep what agrees: which draft tokens does the target accept, and what is gained?

[dim]forge speculation --only run "Once upon a time" 64 --k 4[/dim]

[dim]forge speculation --revoke-draft-at 10[/dim]

[dim]forge speculation pins --model TARGET --draft DRAFT[/dim]  four checks of a pair: is its output exact?
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from forge.cli import completion, options
from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.run_control import create_llm, drive, exit_status, warm_up
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.experiments.repeated_run import REPEAT_SECONDS, REPEATS
from forge.experiments.speculation.borrowing import BorrowedRun, Revocation
from forge.experiments.speculation.pins import PROMPTS, check_pins, pins_report, prompts_of
from forge.llm import LLM
from forge.model.catalog import is_hash_model, resolve_model
from forge.model.loader import open_weights
from forge.option import option
from forge.speculation.setup import DEFAULT_DRAFT
from forge.tokenizer import Tokenizer
from forge.trace.records import SpecDecision, StepRecord
from forge.trace.speculation_summary import SpeculationSummary, cycles_of, draft_totals, undrafted_counts
from forge.views.charts import bar, sparkline
from forge.views.formatting import count, ms, percent, plural, times
from forge.views.json_output import CYCLE_NUMBERS, as_object, picked, run_object
from forge.views.metrics import draft_facts, flowing, verdict
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE
from forge.views.run_view import LiveView
from forge.views.screen import Hanging, Part, Report, report, sentences
from forge.views.speculation import Step, TokenText, marked_text, steps_of
from forge.views.summary import RunResult
from forge.views.terminal import open_console
from forge.views.text import neutralise, quoted, tail

MAX_TOKENS = 64
HASH_DRAFT = "hash:0.8"
MOST_K = 12
"""The longest draft length for which a speed-up is predicted."""
STEADY = 1.25
"""A run whose `spread` is at least this does not tell how fast it is."""
PINS = "pins"
"""The word in place of a prompt that runs the four checks of a pair."""
QUESTION = "Which draft tokens did the target accept?"
CYCLES_SHOWN = 10
CYCLE_INDENT, POSITION_INDENT = 10, 23
"""The columns where a line that does not fit continues: under the first draft token, under the first position."""
_BAR_WIDTH = 12
_PROMPT_SHOWN = 120
_ENGINE = "model kv device threads max_model_len draft k speculate_fixed acceptance"


@dataclass(frozen=True)
class PinArgs:
    """The prompts, seeds and models of the four checks."""

    lengths: str | None = option(None, "Of pins: prompts of so many tokens, 8,64,256.", "Speculation")
    seeds: str | None = option(None, "Of pins, when sampling: 0,1,2.", "Speculation")


@experiment(bugs=True)
def speculation(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = MAX_TOKENS,
    *,
    engine: Annotated[EngineArgs, Takes(_ENGINE, kv="basic", speculate="draft")],
    speculate: Annotated[
        str | None,
        typer.Option(
            "--speculate",
            help="The proposer: draft or ngram.",
            show_default="draft; ngram for a model that the bundled draft cannot draft for",
            autocompletion=completion.one_of("draft", "ngram"),
            rich_help_panel="Speculation",
        ),
    ] = None,
    revocation: Revocation,
    sampling: Annotated[SamplingParams, Takes("temperature top_p top_k seed", ignore_eos=True)],
    pins: PinArgs,
) -> Experiment:
    if speculate == "off":
        raise UsageError("--speculate off proposes nothing: take draft or ngram, or forge generate")
    if revocation.revoke_draft_at is not None and (speculate == "ngram" or revocation.revoke_draft_at < 1):
        raise UsageError("--revoke-draft-at is a number of output tokens, at least 1, for --speculate draft")
    if prompt == PINS and speculate not in (None, "draft"):
        raise UsageError("pins checks a draft model: leave --speculate out")
    if prompt != PINS and (pins.lengths or pins.seeds):
        raise UsageError("--lengths and --seeds are for forge speculation pins")
    engine, sampling = replace(engine, speculate=speculate or "draft"), replace(sampling, max_tokens=max_tokens)
    if prompt != PINS:

        def measure() -> Report:
            fitting = engine if speculate else with_a_proposer(engine)
            llm = create_llm(fitting)
            llm.engine.report_probabilities = True  # what the target says instead, and how surely
            return _measure(llm, options.read_prompt(prompt), sampling, revocation, fitting.drafts)

        return Experiment(measure, alone=revocation.is_asked_for)
    sizes = options.parse_numbers(pins.lengths, "--lengths", "8,64,256", "lengths") if pins.lengths else []
    drawn = options.parse_numbers(pins.seeds, "--seeds", "0,1,2", least=0) if pins.seeds else [sampling.seed or 0]

    def check() -> Report:
        rejection = engine.acceptance == "rejection" and not sampling.greedy
        llm = create_llm(engine, speculate=None, draft=(), speculate_fixed=True)
        how = f"sampled by {'rejection' if rejection else 'gumbel'}, seed {', '.join(map(str, drawn))}"
        how = "greedy" if sampling.greedy else how
        how += f" · prompts of {', '.join(map(str, sizes))} tokens" if sizes else ""
        prompts, seeds = prompts_of(llm, sizes) if sizes else PROMPTS, drawn[:1] if sampling.greedy else drawn
        checked = check_pins(llm, engine.drafts, sampling, prompts, seeds, rejection)
        names = ", ".join(map(str, engine.drafts)) or "tales-draft"
        return pins_report(f"{names} drafts for {llm.model_name} · {how}", checked)

    return Experiment(check, alone=True)


def with_a_proposer(engine: EngineArgs) -> EngineArgs:
    """Choose a proposer for the model if no draft is named: the bundled draft for a model with its tokens, `HASH_DRAFT`
    for the hash model, n-gram lookup for any other."""
    if engine.drafts:
        return engine
    model = str(engine.model)
    if is_hash_model(model):
        return replace(engine, draft=HASH_DRAFT)
    fingerprints = []
    for name in (model, DEFAULT_DRAFT):
        with open_weights(resolve_model(name)) as weights:
            fingerprints.append(Tokenizer(weights.tokenizer_spec()).fingerprint)
    return engine if len(set(fingerprints)) == 1 else replace(engine, speculate="ngram")


def _measure(
    llm: LLM, text: str, params: SamplingParams, revocation: Revocation, drafts: Sequence[str | Path]
) -> Report:
    """Run with draft tokens and without, in turns; the shortest run of each counts."""
    warm_up(llm, text)
    speculation = llm.engine.speculation
    names = [proposer.name for proposer in llm.engine.proposers]
    acceptance = getattr(speculation, "acceptance", "gumbel")
    with LiveSpeculation(open_console(), text, llm.tokenizer.token_text) as view:
        run = llm.start([text], params)
        borrowed = BorrowedRun(llm, run, revocation, drafts)
        drafted_runs = [drive(llm, borrowed, view.step, sampled=not params.greedy)]
    plain_runs: list[RunResult] = []
    same = replace(params, seed=run.seed)

    def again() -> RunResult:
        return drive(llm, llm.start([text], same), sampled=not params.greedy)

    turns = 1 if revocation.is_asked_for else REPEATS
    while not drafted_runs[-1].interrupted and len(plain_runs) < turns:
        if sum(run.seconds for run in drafted_runs) >= REPEAT_SECONDS:
            break
        if plain_runs:
            with llm.engine.lock:
                llm.engine.speculation = speculation
            drafted_runs.append(again())
        llm.speculate_with("off")
        warm_up(llm, text)
        plain_runs.append(again())
    drafted, plain = _shortest(drafted_runs), _shortest(plain_runs) if plain_runs else None
    result = SpeculationResult(
        tuple(names), drafted, plain, llm.tokenizer.token_text, borrowed.draft_release_ms, acceptance, borrowed.told,
        max(map(_spread, (drafted_runs, plain_runs))),
    )  # fmt: skip
    return report(speculation_object(result), lambda: screen(result, text), exit_status(drafted))


def _shortest(runs: Sequence[RunResult]) -> RunResult:
    return min(runs, key=lambda run: run.seconds)


def _spread(runs: Sequence[RunResult]) -> float:
    """Return the median run's time over the shortest's; 1 for a single run."""
    return median(run.seconds for run in runs) / _shortest(runs).seconds if runs else 1.0


@dataclass(frozen=True)
class SpeculationResult:
    """A run with draft tokens, and the same without."""

    proposers: tuple[str, ...]
    drafted: RunResult
    plain: RunResult | None
    """None if the plain run was interrupted."""
    token_text: TokenText
    release_ms: float | None = None
    """Milliseconds from the revocation of the draft to its release, if it was revoked."""
    acceptance: str = "gumbel"
    """The rule by which draft tokens stood."""
    told: Sequence[str] = ()
    """Sentences about models that were taken back and given back."""
    spread: float = 1.0
    """How many times as long the median of the repeated runs took as the shortest, which counts."""

    @cached_property
    def summary(self) -> SpeculationSummary | None:
        return SpeculationSummary.of(self.plain.records, self.drafted.records) if self.plain else None

    @property
    def identical(self) -> bool | None:
        """True if both runs gave the same tokens. None if they need not: drawn by rejection with a draft."""
        drawn_apart = self.drafted.sampled and self.acceptance == "rejection"
        if self.plain is None or (drawn_apart and any(name != "ngram" for name in self.proposers)):
            return None
        return self.plain.output.outputs[0].token_ids == self.drafted.output.outputs[0].token_ids


def cycle_line(number: int, step: Step, token_text: TokenText) -> Text:
    """Format `cycle 3   who lived ~by~  2 of 3  the target says " an" (p 0.41), not " by" (p 0.38)  1.3 + 0.9 ms`."""
    cycle = step.winner
    assert cycle is not None, "a plain step has no cycle to show"
    line = Text.assemble((f"cycle {number:<3}", QUIET))
    for index, token_id in enumerate(cycle.proposed):
        draft = quoted(token_text(token_id))
        bare = draft[1:-1].strip() or draft
        kept = index < cycle.num_accepted
        line.append(" ").append(bare if kept else f"~{bare}~", GOOD if kept else f"{QUIET} strike")
    line.append(f"  {cycle.num_accepted} of {len(cycle.proposed)}", TITLE).append(f"  {why(step, token_text)}  ")
    line.append(f"{ms(cycle.draft_ms)} + {ms(cycle.target_ms)} ms", QUIET)
    return line


def why(step: Step, token_text: TokenText) -> str:
    """Say why the accepted draft tokens ended at this position."""
    cycle = step.winner
    assert cycle is not None, "a plain step has no draft tokens"
    if not step.tokens or len(step.tokens) <= cycle.num_accepted:
        return "the text ended in it"
    target_token = step.tokens[-1]
    choice = quoted(token_text(target_token.token_id)) + _probability(target_token.probability)
    if cycle.num_accepted == len(cycle.proposed):
        return f"and the target adds {choice}"
    verdict = cycle.verdicts[cycle.num_accepted]
    draft = quoted(token_text(verdict.token_id))
    if verdict.draw is None:
        return f"the target says {choice}, not {draft}{_probability(verdict.target_probability)}"
    if verdict.q == 1:
        return f"the target draws {choice}, not {draft} (p {verdict.p:.2f})"
    kept = f"kept below {verdict.p:.2f} / {verdict.q:.2f}, it drew {verdict.draw:.2f}"
    return f"{draft} is rejected ({kept}); drawn instead: {choice}"


def _probability(value: float | None) -> str:
    return "" if value is None else f" (p {value:.2f})"


def decision_sentence(decision: SpecDecision) -> str:
    """Say which draft length was chosen, and why."""
    gain = f"predicted {times(decision.speed_up)}"
    rate = "" if decision.accept_rate is None else f"acceptance {percent(decision.accept_rate)}, "
    wait = f"; it is tried again in {plural(decision.retry_in, 'token')}" if decision.retry_in else ""
    return {
        "fixed": f"{plural(decision.k, 'draft token')} a cycle, as asked for ({rate}{gain})",
        "wins": f"{plural(decision.k, 'draft token')} a cycle ({rate}{gain})",
        "turned_down": f"turned down to {plural(decision.k, 'draft token')} a cycle ({rate}{gain})",
        "loses": f"switched off ({rate}{gain}){wait}",
        "cannot_win": f"switched off: even draft tokens that are all accepted would not pay ({rate}{gain}){wait}",
        "probes": f"one draft token to see whether it pays again ({rate}{gain})",
        "on_again": f"on again with {plural(decision.k, 'draft token')} a cycle ({rate}{gain})",
    }[decision.reason]


def decisions_told(steps: Sequence[Step]) -> list[str]:
    """Say when drafting was switched off and on, and why, each with the preceding step."""
    told, on = [], True
    for step in steps:
        decisions = [cycle.then for cycle in step.cycles if not cycle.error]
        for decision in decisions + [undrafted.decision for undrafted in step.undrafted]:
            if decision is not None and (decision.k > 0) != on:
                on = not on
                told.append(f"after step {step.number}: {decision_sentence(decision)}")
    return told


def acceptance_lines(summary: SpeculationSummary, width: int) -> list[Text]:
    """Draw a bar for each position of a draft."""
    label = "accepted by position "
    lines = [Text.assemble((label, QUIET))]
    for position, (accepted, proposed) in enumerate(summary.accepted_by_position, start=1):
        drawn = bar(accepted / proposed, 1.0, _BAR_WIDTH - 2 * (len(summary.accepted_by_position) > 4))
        share = Text.assemble((f"  {position} ", QUIET), (drawn, ACCENT), f" {percent(accepted / proposed)}")
        if lines[-1].cell_len + share.cell_len > width:
            lines.append(Text(" " * len(label)))
        lines[-1].append_text(share)
    return lines


def course_lines(steps: Sequence[Step], width: int) -> list[Text]:
    """Draw acceptance and draft length over the course of the text."""
    cycles = [step.winner for step in steps if step.winner]
    shares = [cycle.num_accepted / len(cycle.proposed) for cycle in cycles]
    lengths = [len(cycle.proposed) for cycle in cycles]
    most, room = max(lengths), max(10, width - 30)
    drafted = (sparkline(lengths, most, room), ACCENT)
    return [
        Text.assemble(("accepted by cycle    ", QUIET), (sparkline(shares, 1.0, room), ACCENT)),
        Text.assemble(("draft tokens         ", QUIET), drafted, f" {most} at most"),
    ]


def figures_lines(result: SpeculationResult, width: int) -> list[Text]:
    summary = result.summary
    assert summary is not None and result.plain is not None, "without both runs there are no figures"
    steps = steps_of(result.drafted.records)
    facts = [
        ("accepted / proposed", f"{summary.acceptance:.2f}"),
        ("accepted / tested α", f"{summary.alpha:.2f}"),
        ("tokens per cycle", f"{summary.tokens_per_cycle:.1f}"),
        ("target forwards", f"{count(len(steps))} instead of {count(len(result.plain.records))}"),
        ("decode", f"{count(round(summary.speculative.tokens_per_second))} tok/s"),
        ("without a draft", f"{count(round(summary.plain.tokens_per_second))} tok/s"),
    ]
    gained = [
        ("speed-up predicted", f"{summary.predicted:.2f} x"),
        ("t_draft / t_target", f"{summary.draft_cost:.2f}"),
        ("with the verification as measured", f"{summary.predicted_with_verification:.2f} x"),
        ("measured", f"{summary.measured:.2f} x"),
    ]
    return [
        *acceptance_lines(summary, width),
        *course_lines(steps, width),
        *flowing(facts, width),
        *flowing(gained, width),
        *(flowing(draft_facts(result.drafted.records), width) if len(result.proposers) > 1 else []),
    ]


def difference_sentence(summary: SpeculationSummary) -> str:
    """Say why the formula and the clock differ."""
    rows = summary.mean_k + 1
    return (
        f"The formula takes a verification for one forward; of {rows:.1f} rows it took {summary.verify_cost:.2f}. "
        f"Outside the models a plain step spends {ms(summary.plain.other_ms)} ms and one with draft tokens "
        f"{ms(summary.speculative.other_ms)} ms."
    )


def screen(result: SpeculationResult, prompt: str) -> Iterator[Part]:
    """Draw the text, the cycles, the figures, and whether speculation changed the output."""
    steps, summary = steps_of(result.drafted.records), result.summary
    yield from (lambda width: [_heading(result.proposers, result.drafted, width)], None)
    yield Text(neutralise(tail(prompt, _PROMPT_SHOWN)), QUIET) + marked_text(steps, result.token_text)
    yield from ("[accepted]  ~first rejected~  the target's own   ms of a cycle: draft + target", None)
    yield from (Hanging(line, CYCLE_INDENT) for line in _cycle_lines(steps, result.token_text))
    yield from sentences([*decisions_told(steps), *_failures(steps, result), *result.told])
    if summary is None:
        yield Text("interrupted" if result.drafted.interrupted else "no draft tokens were proposed: no figures")
        return
    yield None
    yield lambda width: [Hanging(line, POSITION_INDENT) for line in figures_lines(result, width)]
    yield from (Text(difference_sentence(summary)), None, _verdict(result))


def _cycle_lines(steps: Sequence[Step], token_text: TokenText) -> Iterator[Text]:
    drafting = [step for step in steps if step.winner]
    for number, step in enumerate(drafting[:CYCLES_SHOWN], start=1):
        yield cycle_line(number, step, token_text)
    if len(drafting) > CYCLES_SHOWN:
        yield Text(f"… and {plural(len(drafting) - CYCLES_SHOWN, 'cycle')} more, all in --json", QUIET)


def _failures(steps: Sequence[Step], result: SpeculationResult) -> Iterator[str]:
    for step in steps:
        for cycle in step.cycles:
            if cycle.error:
                released = "" if result.release_ms is None else f"; released {ms(result.release_ms)} ms after that"
                yield f"step {step.number}: {cycle.error}{released}. The target goes on without {cycle.proposer}."


def _verdict(result: SpeculationResult) -> Text:
    tokens = plural(len(result.drafted.output.outputs[0].token_ids), "token")
    if result.identical is None:
        drawn = "drawn from the distribution that the target alone has; other draws than without a draft"
        return Text(f"{tokens}, {drawn}")
    return verdict(result.identical, f"{tokens} with a draft and without", "the tokens differ with a draft and without")


def _heading(proposers: Sequence[str], result: RunResult, width: int) -> Text:
    how = f"seed {result.output.seed}" if result.sampled else "greedy"
    setup = f"{', '.join(proposers)} drafts for {result.label.model} · {how}"
    room = width - len(QUESTION)
    if len(setup) + 3 > room:
        return Text.assemble((QUESTION, TITLE), "\n", (setup, QUIET))
    return Text.assemble((QUESTION, TITLE), (f"{setup:>{room}}", QUIET), no_wrap=True)


def speculation_object(result: SpeculationResult) -> dict[str, Any]:
    """Return everything for `--json`: the run, its cycles, their totals."""
    steps = steps_of(result.drafted.records)
    summary = result.summary
    facts: dict[str, Any] = run_object(result.drafted, result.token_text) | {
        "proposers": list(result.proposers),
        "identical": result.identical,
        "release_ms": result.release_ms,
        "leases": list(result.told),
        "drafts": [as_object(draft, "acceptance") for draft in draft_totals(step.cycles for step in steps)],
        "errors": list(result.drafted.output.outputs[0].errors),
        "cycles": [
            {"step": step.number, **as_object(cycle, *CYCLE_NUMBERS)} for step in steps for cycle in step.cycles
        ],
        "target_forwards": len(steps),
        "plain_forwards": None if result.plain is None else len(result.plain.records),
        "steady": result.spread < STEADY,
        "sampled": result.drafted.sampled,
        "acceptance_rule": result.acceptance,
        "example": _example(result),
        "has_example": _example(result) is not None,
        "draft_has_cache": any(cycle.draft_cached is not None for cycle in cycles_of(result.drafted.records)),
        "num_cycles": len([cycle for cycle in cycles_of(result.drafted.records) if cycle.won and cycle.proposed]),
        "reasons": dict(
            Counter(cycle.decision.reason for step in steps for cycle in step.cycles if cycle.decision is not None)
        ),
        "undrafted": undrafted_counts(result.drafted.records),
    }
    if summary is None or result.plain is None:
        return facts
    return facts | {
        **picked(summary, "acceptance", "alpha"),
        "expected_tokens": [summary.expected_tokens(k) for k in range(17)],
        **picked(summary, "tokens_per_pass", "drafting_share", "mean_k", "tokens_per_cycle"),
        "accepted_by_position": [accepted / proposed for accepted, proposed in summary.accepted_by_position],
        "best_k": summary.best_k(MOST_K),
        "best_predicted": summary.predicted_for(summary.best_k(MOST_K)),
        **picked(summary, "draft_cost", "verify_cost", "draft_ms", "verify_ms"),
        "plain_forward_ms": summary.plain.forward_ms,
        "tokens_per_second": summary.speculative.tokens_per_second,
        "plain_tokens_per_second": summary.plain.tokens_per_second,
        **picked(summary, "predicted", "predicted_with_verification", "measured"),
    }


def _example(result: SpeculationResult) -> dict[str, float] | None:
    """Return the probabilities of the first draft token that the draft proposed too often; None if none were
    compared."""
    verdicts = (verdict for cycle in cycles_of(result.drafted.records) for verdict in cycle.verdicts)
    pairs = ((verdict.p, verdict.q) for verdict in verdicts)
    return next(({"p": p, "q": q} for p, q in pairs if p is not None and q is not None and 0.01 < p < q < 1), None)


class LiveSpeculation(LiveView):
    """A live view of the marked text, above the last cycle and the acceptance so far. It disappears when the run
    ends."""

    frames_per_second = 20

    def __init__(self, console: Console, prompt: str, token_text: TokenText):
        super().__init__(console)
        self._prompt, self._token_text = prompt, token_text
        self._steps: list[Step] = []

    def step(self, record: StepRecord) -> None:
        self._steps.append(Step(len(self._steps) + 1, record.tokens, record.cycles))
        self.redraw()

    def frame(self) -> Group:
        width, height = self._console.size
        drafting = [step for step in self._steps if step.winner]
        won = [cycle for step in drafting if (cycle := step.winner)]
        proposed = sum(len(cycle.proposed) for cycle in won)
        accepted = sum(cycle.num_accepted for cycle in won)
        text = Text(neutralise(tail(self._prompt, _PROMPT_SHOWN)), QUIET) + marked_text(self._steps, self._token_text)
        lines = [
            Text(QUESTION, TITLE),
            Text(""),
            *list(text.wrap(self._console, width))[-max(1, height - 8) :],
            Text(""),
        ]
        if drafting:
            lines.append(cycle_line(len(drafting), drafting[-1], self._token_text))
            share, heading = accepted / proposed, ("accepted so far ", QUIET)
            lines.append(Text.assemble(heading, (bar(share, 1.0, 24), ACCENT), f" {percent(share)}"))
        return Group(*lines)
