"""`forge kv-cache`: chapter 2. Its experiment is the same run with the cache: what does a token cost, what is held?"""

from typing import TYPE_CHECKING

import typer

from forge.cli import options
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.naive import MAX_TOKENS
from forge.cli.running import Found, Watch, drive, exit_status, load_model, run_label, warm_up

if TYPE_CHECKING:
    from forge.views.report import Report


def kv_cache(
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
    """2. Prefill and decode are different work: keep keys and values.

    [dim]forge kv-cache --only run "Once upon a time" 32[/dim]
    """
    watch = Watch(trace, step)
    if not watch.is_on and reads_chapter(only, json):
        return read_chapter(ctx, pause)
    report = _measure(prompt, max_tokens, model, options.model_options(device=device, threads=threads), watch)
    return report.as_json() if json else report


def _measure(prompt: str, max_tokens: int, model: str, loading: dict, watch: Watch) -> "Report":
    from forge.cache.kv_storage import KV_ITEM_BYTES
    from forge.views.generation import watching
    from forge.views.kv_cache import KvShape, kv_cache_object, print_kv_cache
    from forge.views.report import Report
    from forge.views.terminal import open_console

    text = options.read_prompt(prompt)
    params = options.sampling_params(max_tokens=max_tokens, ignore_eos=True)
    llm = load_model(model, kv="basic", **loading)
    warm_up(llm, text)
    with watching(open_console(), run_label(llm), text) as view:
        result = drive(llm, llm.start([text], params), params, view.step, watch)
    layout = llm.kv_layout
    shape = KvShape(layout.num_layers, layout.num_kv_heads, layout.head_dim, KV_ITEM_BYTES[layout.kv_dtype])
    facts = kv_cache_object(result, shape, llm.tokenizer.token_text)
    return Report(facts, lambda console: print_kv_cache(console, result, shape, text), exit_status(result))
