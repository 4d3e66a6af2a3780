"""`forge kv-cache`: the chapter's experiment with the cache. What does a token cost now, and what is held for it?"""

import typer

from forge.cli import options
from forge.cli.running import drive, exit_status, load_model, run_label


def kv_cache(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    model: options.ModelOption = "tales",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """The same run with keys and values kept: flat forwards. What is held for it?"""
    from forge.cache.kv_storage import KV_ITEM_BYTES
    from forge.views.generation import watching
    from forge.views.kv_cache import KvShape, print_kv_cache
    from forge.views.terminal import open_console

    text = options.read_prompt(prompt)
    params = options.sampling_params(max_tokens=max_tokens, ignore_eos=True)
    llm = load_model(model, kv="basic", **options.model_options(device=device, threads=threads))
    console = open_console()
    with watching(console, run_label(llm), text) as view:
        result = drive(llm, llm.start([text], params), params, view.step)
    layout = llm.kv_layout
    shape = KvShape(layout.num_layers, layout.num_kv_heads, layout.head_dim, KV_ITEM_BYTES[layout.kv_dtype])
    print_kv_cache(console, result, shape, text)
    raise typer.Exit(exit_status(result))
