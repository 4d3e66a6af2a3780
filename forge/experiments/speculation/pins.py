"""Four checks of a target and its draft, on their own models: what makes speculation exact, compared by running it.

- The target as its own draft: every draft token is accepted.
- The logits of a batched verification are, bit by bit, those of one forward per token.
- In every cycle the target's cache grows by the emitted tokens, and the draft's cache never holds more of the text.
- The output with the draft is the output without. By rejection it need not be: there its distribution is compared,
  by chi-squared of the tokens at two positions of many samples, with the target's own.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.text import Text

from forge.engine.sampling_params import SamplingParams
from forge.llm import LLM, Prompt
from forge.speculation.draft import DraftProposer
from forge.trace.records import SpecCycle, StepRecord
from forge.views.palette import GOOD, QUIET, TROUBLE
from forge.views.screen import Hanging, Part, Report, question, report
from forge.views.text import one_line
from forge.workload.requests import PASSAGE

SAMPLES = 600
"""Samples of each side, for the comparison of distributions."""
POSITIONS = (2, 3)
"""Output tokens that are compared: the first is the prefill's own, these are verified."""
_BEYOND_CHANCE = 4.0
"""Standard deviations; one statistic in 30,000 lies above them by chance."""
_FEW = 10
"""A token that both sides together say less often shares its bin with others."""
PROMPTS = ("Once upon a time", "The cat sat on the mat. The cat sat on", "a")
_NAME = 48


@dataclass(frozen=True)
class Pin:
    """The result of one check."""

    name: str
    compared: str
    """What was compared, and how much of it."""
    failure: str | None = None
    """The first place where it failed, and how; None if it held."""


@dataclass(frozen=True)
class _Outcome:
    token_ids: tuple[int, ...]
    logits: list[np.ndarray]
    records: list[StepRecord]
    cached: list[dict[int, int]]
    """The computed length of each running sequence in the target's cache, after each step."""
    drafted: list[dict[int, int]]
    """The same in the drafts' caches, the longest of them."""


def prompts_of(llm: LLM, lengths: Sequence[int]) -> list[list[int]]:
    """Cut prompts of each length in tokens from one text."""
    text = list(llm.tokenizer.encode(PASSAGE))
    return [[text[place % len(text)] for place in range(length)] for length in lengths]


def check_pins(
    llm: LLM,
    draft: Sequence[str | Path],
    params: SamplingParams,
    prompts: Sequence[Prompt] = PROMPTS,
    seeds: Sequence[int] = (0,),
    rejection: bool = False,
) -> tuple[Pin, ...]:
    """Run every prompt with every seed without a draft, with the target as its own draft, and with `draft`. `llm` is
    left without. With `rejection`, where the draws of a run and its verification differ from a run without a draft, the
    distributions are compared in place of logits and tokens."""

    def run_all() -> list[_Outcome]:
        return [_run(llm, prompt, replace(params, seed=seed)) for seed in seeds for prompt in prompts]

    llm.speculate_with("off")
    plain = run_all()
    sampled = _samples(llm, prompts[0], params, 0) if rejection else {}
    llm.speculate_with("draft", [llm.path or llm.model_name])
    itself = run_all()
    llm.speculate_with("draft", draft)
    drafted = run_all()
    resampled = _samples(llm, prompts[0], params, 1) if rejection else {}
    llm.speculate_with("off")
    judged = [(_accepts_itself(itself), itself), (_advances(drafted), drafted)]
    if rejection:
        judged.append((_same_distribution(sampled, resampled), drafted))
    else:
        judged.insert(1, (_batched(plain, drafted), drafted))
        judged.append((_same_output(plain, drafted), drafted))
    return tuple(
        replace(pin, failure="nothing was proposed") if not pin.failure and not any(_cycles(runs)) else pin
        for pin, runs in judged
    )


Samples = dict[int, Counter[int]]
"""Position → how often each token was said there."""


def _samples(llm: LLM, prompt: Prompt, params: SamplingParams, seed: int) -> Samples:
    many = replace(params, n=SAMPLES, seed=seed, max_tokens=max(POSITIONS))
    (output,) = llm.generate([prompt], many)
    return {place: Counter(sample.token_ids[place - 1] for sample in output.outputs) for place in POSITIONS}


def _same_distribution(alone: Samples, drafted: Samples) -> Pin:
    statistics, failure = [], None
    for place in POSITIONS:
        statistic, degrees = chi_squared(alone[place], drafted[place])
        statistics.append(f"{statistic:.1f} of {degrees}")
        spread = 2 / (9 * max(degrees, 1))  # Wilson and Hilferty (1931): how many standard deviations above chance
        above = ((statistic / max(degrees, 1)) ** (1 / 3) - (1 - spread)) / spread**0.5
        if above > _BEYOND_CHANCE and failure is None:
            failure = f"output token {place}: chi-squared {statistic:.1f}, and by chance about {degrees}"
    compared = f"{SAMPLES} samples each, chi-squared {' and '.join(statistics)} degrees of freedom"
    return Pin("the distribution is that of the target alone", compared, failure)


def chi_squared(left: Counter[int], right: Counter[int]) -> tuple[float, int]:
    """Return Pearson's statistic of two samples of the same size, and its degrees of freedom; rare tokens share a
    bin."""
    bins, few = [], (0, 0)
    for token in left.keys() | right.keys():
        if left[token] + right[token] < _FEW:
            few = few[0] + left[token], few[1] + right[token]
        else:
            bins.append((left[token], right[token]))
    bins += [few] if sum(few) else []
    return sum((left - right) ** 2 / (left + right) for left, right in bins), len(bins) - 1


def _run(llm: LLM, prompt: Prompt, params: SamplingParams) -> _Outcome:
    run = llm.start([prompt], params, keep_logits=True)
    cache, outcome = llm.engine.cache, _Outcome((), [], [], [], [])
    drafts = [proposer for proposer in llm.engine.proposers if isinstance(proposer, DraftProposer)]
    for record in run:
        ids = [item.seq_id for item in record.items]
        outcome.records.append(record)
        outcome.cached.append({seq_id: cache.computed_length(seq_id) for seq_id in ids if seq_id in cache})
        lengths = {
            seq_id: [proposer.cache.computed_length(seq_id) for proposer in drafts if seq_id in proposer.cache]
            for seq_id in ids
        }
        outcome.drafted.append({seq_id: max(known) for seq_id, known in lengths.items() if known})
    return replace(outcome, token_ids=run.outputs[0].outputs[0].token_ids, logits=run.logits)


def _accepts_itself(runs: Sequence[_Outcome]) -> Pin:
    proposed = accepted = 0
    failure = None
    for number, cycle in _cycles(runs):
        proposed += len(cycle.proposed)
        accepted += cycle.num_accepted
        if cycle.num_accepted < len(cycle.proposed) and failure is None:
            rejected = cycle.verdicts[cycle.num_accepted]
            failure = (
                f"prompt {number}, position {cycle.start + cycle.num_accepted}: the draft says token "
                f"{rejected.token_id}, the target {rejected.target_argmax}"
            )
    compared = f"{accepted:,} of {proposed:,} draft tokens accepted"
    return Pin("the target as its own draft is always accepted", compared, failure)


def _batched(plain: Sequence[_Outcome], drafted: Sequence[_Outcome]) -> Pin:
    rows, failure = 0, None
    for number, (single, verified) in enumerate(zip(plain, drafted, strict=True), start=1):
        for place, (alone, together) in enumerate(zip(single.logits, verified.logits, strict=False), start=1):
            rows += 1
            if alone.tobytes() != together.tobytes() and failure is None:
                largest = float(np.abs(alone - together).max())
                failure = f"prompt {number}, output token {place}: a logit differs by {largest:.3g}"
    return Pin("batched verification is one forward per token", f"{rows:,} rows of logits, all bits", failure)


def _advances(runs: Sequence[_Outcome]) -> Pin:
    cycles, failure = 0, None
    for number, run in enumerate(runs, start=1):
        steps = zip(run.records, run.cached, [{}, *run.cached], run.drafted, strict=False)
        for record, after, before, in_draft in steps:
            for cycle in record.cycles:
                if not (cycle.won and cycle.proposed and cycle.seq_id in after and cycle.seq_id in before):
                    continue
                cycles += 1
                grown, emitted = after[cycle.seq_id] - before[cycle.seq_id], len(cycle.emitted)
                where = f"prompt {number}, step {record.step}"
                if grown != emitted:
                    failure = failure or f"{where}: {emitted} tokens were emitted and the cache grew by {grown}"
                known, longest = cycle.start + emitted, cycle.start - 1 + len(cycle.proposed)
                if in_draft.get(cycle.seq_id, 0) > max(known, longest):
                    failure = failure or f"{where}: the draft's cache holds {in_draft[cycle.seq_id]} of {known} tokens"
    return Pin("the cache advances by what was emitted", f"{cycles:,} cycles", failure)


def _same_output(plain: Sequence[_Outcome], drafted: Sequence[_Outcome]) -> Pin:
    failure = None
    for number, (alone, guided) in enumerate(zip(plain, drafted, strict=True), start=1):
        if alone.token_ids != guided.token_ids and failure is None:
            pairs = enumerate(zip(alone.token_ids, guided.token_ids, strict=False), start=1)
            place = next((place for place, (left, right) in pairs if left != right), None)
            where = "one ends before the other" if place is None else f"output token {place} differs"
            failure = f"prompt {number}: {where}"
    tokens = sum(len(outcome.token_ids) for outcome in plain)
    return Pin("the output is that of the target alone", f"{tokens:,} tokens of {len(plain)} prompts", failure)


def _cycles(runs: Sequence[_Outcome]) -> Iterator[tuple[int, SpecCycle]]:
    """Yield (the prompt's number, the cycle), without cycles that have no draft tokens."""
    for number, run in enumerate(runs, start=1):
        for record in run.records:
            yield from ((number, cycle) for cycle in record.cycles if cycle.proposed)


def pins_report(label: str, pins: Sequence[Pin]) -> Report:
    """Report the checks, with exit status 1 if one failed."""

    def screen() -> Iterator[Part]:
        yield from question("Is this pair exact?", one_line(label))
        for pin in pins:
            sign, style = ("✓", GOOD) if pin.failure is None else ("✗", TROUBLE)
            yield Hanging(Text.assemble((f"{sign} ", style), f"{pin.name:<{_NAME}}", (pin.compared, QUIET)), 2)
            if pin.failure is not None:
                yield Hanging(Text(f"  {one_line(pin.failure)}"), 2)

    held = all(pin.failure is None for pin in pins)
    return report({"held": held, "pins": [asdict(pin) for pin in pins]}, screen, 0 if held else 1)
