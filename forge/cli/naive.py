"""`forge naive`: chapter 1. Its experiment has no cache: why does every token cost more, and where does it go?"""

from typing import TYPE_CHECKING

import typer

from forge.cli import options
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.running import Found, Watch, drive, exit_status, load_model, run_label, warm_up

if TYPE_CHECKING:
    from forge.views.report import Report

MAX_TOKENS = 128
"""Enough for the climb to be more than the machine's unrest."""


def naive(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = MAX_TOKENS,
    model: options.ModelOption = "tales",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    trace: options.TraceOption = None,
    step: options.StepOption = False,
    only: OnlyOption = None,
    pause: PauseOption = True,
    json: options.JsonOption = False,
) -> Found:
    """1. A forward pass, token by token, and where its time goes.

    [dim]forge naive --only run "Once upon a time" 32[/dim]
    """
    watch = Watch(trace, step)
    if not watch.is_on and reads_chapter(only, json):
        return read_chapter(ctx, pause)
    report = _measure(prompt, max_tokens, model, options.model_options(device=device, threads=threads), watch)
    return report.as_json() if json else report


def _measure(prompt: str, max_tokens: int, model: str, loading: dict, watch: Watch) -> "Report":
    from forge.views.generation import watching
    from forge.views.naive import naive_object, print_naive
    from forge.views.report import Report
    from forge.views.terminal import open_console

    text = options.read_prompt(prompt)
    params = options.sampling_params(max_tokens=max_tokens, ignore_eos=True)
    llm = load_model(model, kv="off", **loading)
    warm_up(llm, text)
    with watching(open_console(), run_label(llm), text) as view:
        result = drive(llm, llm.start([text], params), params, view.step, watch)
    if not result.interrupted:  # once more, with a clock around every operation, which takes time of its own
        llm.time_operations()
        with watching(open_console(), run_label(llm), text) as view:
            drive(llm, llm.start([text], params), params, view.step)
    operations = llm.operation_times()
    facts = naive_object(result, operations, llm.tokenizer.token_text)
    return Report(facts, lambda console: print_naive(console, result, operations, text), exit_status(result))
