"""`forge speculation`: chapter 7. Its experiment: a draft guesses, the target verifies. Which guesses did it keep, why,
and what was gained?
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import completion, options
from forge.cli.borrowing import BorrowedRun, Revocation
from forge.cli.bugs import BugOption, run_bug
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.running import Found, drive, exit_status, load_model, run_label, warm_up

if TYPE_CHECKING:
    from forge.engine.sampling_params import SamplingParams
    from forge.llm import LLM
    from forge.views.report import Report

MAX_TOKENS = 64
PINS = "pins"
"""In place of a prompt: the four checks of a pair."""


def speculation(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = MAX_TOKENS,
    model: options.ModelOption = "tales",
    kv: options.KvOption = "basic",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.MaxModelLenOption = None,
    speculate: Annotated[
        str,
        typer.Option(
            "--speculate",
            help="The proposer: draft or ngram.",
            autocompletion=completion.one_of("draft", "ngram"),
            rich_help_panel="Speculation",
        ),
    ] = "draft",
    draft: options.DraftOption = None,
    k: options.KOption = None,
    speculate_fixed: options.SpeculateFixedOption = False,
    acceptance: options.AcceptanceOption = None,
    revoke_draft_at: Annotated[
        int | None,
        typer.Option(
            "--revoke-draft-at",
            help="Take the draft back after this many output tokens: the experiment alone.",
            rich_help_panel="Speculation",
        ),
    ] = None,
    return_draft_at: Annotated[
        int | None,
        typer.Option(
            "--return-draft-at",
            help="Load the draft again after this many output tokens.",
            rich_help_panel="Speculation",
        ),
    ] = None,
    revoke_target_at: Annotated[
        int | None,
        typer.Option(
            "--revoke-target-at",
            help="Take the target back after this many output tokens, and give it back: the sequence waits.",
            rich_help_panel="Speculation",
        ),
    ] = None,
    temperature: options.TemperatureOption = 0.0,
    top_p: options.TopPOption = 1.0,
    top_k: options.TopKOption = 0,
    seed: options.SeedOption = None,
    only: OnlyOption = None,
    pause: PauseOption = True,
    bug: BugOption = None,
    json: options.JsonOption = False,
) -> Found:
    """7. Guess, verify, keep what agrees: which guesses does the target keep, and what is gained?

    [dim]forge speculation --only run "Once upon a time" 64 --k 4[/dim]

    [dim]forge speculation --revoke-draft-at 10[/dim]

    [dim]forge speculation pins --model TARGET --draft DRAFT[/dim]  four checks of a pair: is its output exact?
    """
    from forge.errors import UsageError

    if bug is not None:
        return run_bug("speculation", bug, device, threads, json)
    if speculate == "off":
        raise UsageError("--speculate off proposes nothing: take draft or ngram, or forge generate")
    if revoke_draft_at is not None and (speculate != "draft" or revoke_draft_at < 1):
        raise UsageError("--revoke-draft-at is a number of output tokens, at least 1, for --speculate draft")
    if return_draft_at is not None and (revoke_draft_at is None or return_draft_at <= revoke_draft_at):
        raise UsageError("--return-draft-at is a number of output tokens above --revoke-draft-at, which it needs")
    if revoke_target_at is not None and revoke_target_at < 1:
        raise UsageError(f"--revoke-target-at is a number of output tokens, at least 1, and not {revoke_target_at}")
    revocation = Revocation(revoke_draft_at, return_draft_at, revoke_target_at, tuple(draft or ()))
    if prompt == PINS and (speculate != "draft" or acceptance not in (None, "gumbel")):
        raise UsageError("pins checks a draft model with --acceptance gumbel: other tokens need not be the target's")
    if prompt != PINS and reads_chapter(only, json) and revoke_draft_at is None and revoke_target_at is None:
        return read_chapter(ctx, pause)
    drawing = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    loading = {"kv": kv, "device": device, "threads": threads, "max_model_len": max_model_len}
    if prompt == PINS:
        llm = load_model(model, **options.model_options(**loading, k=k, speculate_fixed=True))
        report = _pins(llm, draft or (), options.sampling_params(max_tokens=max_tokens, ignore_eos=True, **drawing))
        return report.as_json() if json else report
    guessing = {"speculate": speculate, "draft": draft, "k": k}
    guessing |= {"speculate_fixed": speculate_fixed, "acceptance": acceptance}
    llm = load_model(model, **options.model_options(**loading, **guessing))
    report = _measure(llm, options.read_prompt(prompt), max_tokens, drawing, revocation)
    return report.as_json() if json else report


def _pins(llm: "LLM", draft: "Sequence[str]", params: "SamplingParams") -> "Report":
    from forge.bench.pins import check_pins
    from forge.views.pins import pins_report

    names = ", ".join(draft) or "tales-draft"
    params = params if params.seed is not None else _with_seed(params, 0)
    how = "greedy" if params.greedy else f"sampled, seed {params.seed}"
    return pins_report(f"{names} guesses for {llm.model_name} · {how}", check_pins(llm, draft, params))


def _measure(llm: "LLM", text: str, max_tokens: int, drawing: dict, revocation: Revocation) -> "Report":
    """Run with guesses, then once more without."""
    from forge.views.report import Report
    from forge.views.speculation import SpeculationResult, print_speculation, speculation_object, watching
    from forge.views.terminal import open_console

    params = options.sampling_params(max_tokens=max_tokens, ignore_eos=True, **drawing)
    warm_up(llm, text)
    speculation = llm.engine.speculation
    names = [proposer.name for proposer in speculation.proposers]
    with watching(open_console(), run_label(llm), text, llm.tokenizer.token_text) as view:
        run = llm.start([text], params)
        borrowed = BorrowedRun(llm, run, revocation)
        guessed = drive(llm, borrowed, params, view.step)
    llm.speculate_with("off")
    plain = None
    if not guessed.interrupted:
        warm_up(llm, text)
        plain = drive(llm, llm.start([text], _with_seed(params, run.seed)), params, lambda record: None)
    result = SpeculationResult(
        tuple(names),
        guessed,
        plain,
        llm.tokenizer.token_text,
        borrowed.draft_release_ms,
        getattr(speculation, "acceptance", "gumbel"),
        borrowed.told,
    )
    return Report(
        speculation_object(result), lambda console: print_speculation(console, result, text), exit_status(guessed)
    )


def _with_seed(params, seed: int):
    from dataclasses import replace

    return replace(params, seed=seed)
