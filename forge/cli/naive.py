"""`forge naive`: the chapter's experiment without a cache. Why does every token cost more, and where does it go?"""

import typer

from forge.cli import options
from forge.cli.running import drive, exit_status, load_model, run_label


def naive(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    model: options.ModelOption = "tales",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Generate without a cache: forwards climb. Where does the time go?"""
    from forge.views.generation import watching
    from forge.views.naive import print_naive
    from forge.views.terminal import open_console

    text = options.read_prompt(prompt)
    params = options.sampling_params(max_tokens=max_tokens, ignore_eos=True)
    loading = options.model_options(device=device, threads=threads)
    llm = load_model(model, kv="off", time_operations=True, **loading)
    console = open_console()
    with watching(console, run_label(llm), text) as view:
        result = drive(llm, llm.start([text], params), params, view.step)
    print_naive(console, result, llm.operation_times(), text)
    raise typer.Exit(exit_status(result))
