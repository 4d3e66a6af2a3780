"""`forge compare`: the same prompt on two sides that differ in one option. Same tokens? At what cost?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from forge.cli import options
from forge.cli.running import Found, drive, exit_status, load_model, warm_up
from forge.cli.versus import versus_of

if TYPE_CHECKING:
    from forge.trace.records import StepRecord
    from forge.views.comparison import Side

DIFFERENT = 1
"""The exit status when the two sides' tokens differ."""

_LOADING = ("kv", "device", "threads", "max_model_len", "block_size", "kv_dtype", "quantize")
_SPECULATION = ("speculate", "draft", "k", "speculate_fixed")
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos")


def compare(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    model: options.ModelOption = "tales",
    kv: options.KvOption = "off",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = None,
    kv_dtype: options.KvDtypeOption = None,
    quantize: options.QuantizeOption = None,
    speculate: options.SpeculateOption = None,
    draft: options.DraftOption = None,
    k: options.KOption = None,
    speculate_fixed: options.SpeculateFixedOption = False,
    temperature: options.TemperatureOption = 0.0,
    top_p: options.TopPOption = 1.0,
    top_k: options.TopKOption = 0,
    min_p: options.MinPOption = 0.0,
    repetition_penalty: options.RepetitionPenaltyOption = 1.0,
    seed: options.SeedOption = None,
    stop: options.StopOption = None,
    ignore_eos: options.IgnoreEosOption = False,
    json: options.JsonOption = False,
) -> Found:
    """Run one prompt on two sides that differ in one option, given as A vs B.

    Every other option holds for both sides. Exit status 1 if the tokens differ.

    [dim]forge compare --kv off vs on "The fox and the lantern" 64[/dim]

    [dim]forge compare --kv on --speculate off vs draft[/dim]
    """
    from forge.views.comparison import (
        ComparisonProgress,
        Side,
        compare_runs,
        comparison_object,
        print_comparison,
        print_interrupted,
        question_for,
    )
    from forge.views.report import Report
    from forge.views.terminal import open_console

    versus = versus_of(ctx)
    text = options.read_prompt(prompt)
    question = question_for(versus.option)
    console = open_console()
    sides: list[Side] = []
    with ComparisonProgress(console, question, versus.names, max_tokens, quiet=json) as progress:
        for name, given in zip(versus.names, (ctx.params, versus.right), strict=True):
            side = _run_side(name, given, text, sides, progress.step)
            sides.append(side)
            if side.result.interrupted:
                break
    if sides[-1].result.interrupted:
        print_interrupted(console, sides)
        raise typer.Exit(exit_status(sides[-1].result))
    comparison = compare_runs(question, versus.option, *sides)
    report = Report(
        comparison_object(comparison),
        lambda console: print_comparison(console, comparison, text),
        0 if comparison.identical else DIFFERENT,
    )
    return report.as_json() if json else report


def _run_side(
    name: str,
    given: Mapping[str, Any],
    prompt: str,
    earlier: "Sequence[Side]",
    on_step: "Callable[[int, StepRecord], None]",
) -> "Side":
    """Load what this side asks for and run it. A seed that nobody gave is drawn once, for both sides."""
    from forge.views.comparison import Side

    params = options.sampling_params(**{option: given[option] for option in _SAMPLING})
    if earlier and params.seed is None:
        params = replace(params, seed=earlier[0].result.output.seed)
    loading = options.model_options(**{option: given[option] for option in (*_LOADING, *_SPECULATION)})
    llm = load_model(given["model"], **loading)
    warm_up(llm, prompt)
    run = llm.start([prompt], params, keep_logits=True)
    result = drive(llm, run, params, lambda record: on_step(len(earlier), record))
    return Side(name, result, run.logits)
