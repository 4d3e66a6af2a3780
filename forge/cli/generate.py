"""`forge generate`: continue a prompt, and watch what every forward costs."""

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.running import Watch, drive, exit_status, load_model, run_label

if TYPE_CHECKING:
    from forge.engine.sampling_params import SamplingParams
    from forge.llm import LLM
    from forge.trace.records import StepRecord

_PROMPT, _OUTPUT = "Prompt", "Output"


def generate(
    prompt: options.PromptArgument,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    model: options.ModelOption = "tales",
    kv: options.KvWish = None,
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = None,
    num_blocks: options.NumBlocksOption = None,
    kv_memory: options.KvMemoryOption = None,
    kv_dtype: options.KvDtypeOption = None,
    quantize: options.QuantizeOption = None,
    invariant: options.InvariantOption = False,
    speculate: options.SpeculateOption = None,
    draft: options.DraftOption = None,
    k: options.KOption = None,
    speculate_fixed: options.SpeculateFixedOption = False,
    acceptance: options.AcceptanceOption = None,
    temperature: options.TemperatureOption = 0.0,
    top_p: options.TopPOption = 1.0,
    top_k: options.TopKOption = 0,
    min_p: options.MinPOption = 0.0,
    repetition_penalty: options.RepetitionPenaltyOption = 1.0,
    seed: options.SeedOption = None,
    stop: options.StopOption = None,
    ignore_eos: options.IgnoreEosOption = False,
    json_schema: options.JsonSchemaOption = None,
    regex: options.RegexOption = None,
    choice: options.ChoiceOption = None,
    grammar: options.GrammarOption = None,
    n: Annotated[int, typer.Option("--n", help="Samples of the same prompt.", rich_help_panel="Sampling")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message.", rich_help_panel=_PROMPT)
    ] = False,
    system: Annotated[
        str | None, typer.Option("--system", help="System message; implies --chat.", rich_help_panel=_PROMPT)
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt too.", rich_help_panel=_OUTPUT)] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="List this many likeliest tokens per output token.", rich_help_panel=_OUTPUT),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option("--prompt-logprobs", help="The same for each prompt token.", rich_help_panel=_OUTPUT),
    ] = None,
    show: options.ShowOption = None,
    pace: options.PaceOption = options.DEFAULT_PACE,
    trace: options.TraceOption = None,
    step: options.StepOption = False,
    check: options.CheckOption = False,
    json: options.JsonOption = False,
) -> None:
    """Continue a prompt, and watch what every forward costs.

    [dim]forge generate --kv basic "Once upon a time" 32[/dim]

    [dim]forge generate --kv paged --num-blocks 64 --show blocks "Once upon a time" 64[/dim]

    [dim]forge generate --choice happy --choice sad "The fox had lost his lantern. He was"[/dim]
    """
    options.check_speculation(speculate, draft, k, acceptance)
    kv = options.kv_or_default(kv, speculate)
    blocks, pace = options.shows_blocks(show, kv), options.checked_pace(pace)
    text = options.read_prompt(prompt)
    scored = 0 if prompt_logprobs is None and echo and max_tokens == 0 else prompt_logprobs
    params = options.sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        n=n,
        logprobs=logprobs,
        prompt_logprobs=scored,
        structured=options.structured_output(json_schema, regex, choice, grammar),
    )
    loading = options.model_options(
        kv=kv,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        quantize=quantize,
        invariant=invariant or None,
        speculate=speculate,
        draft=draft,
        k=k,
        speculate_fixed=speculate_fixed,
        acceptance=acceptance,
        check=check,
    )
    watch = Watch(trace, step)
    llm = load_model(model, **loading)
    llm.engine.report_blocks = blocks
    token_ids = chat_prompt(llm, text, system) if chat or system is not None else None
    if json:
        status = _run_json(llm, text, token_ids, params, watch)
    else:
        status = _run_shown(llm, text, token_ids, params, watch, echo, prompt_logprobs, pace)
    raise typer.Exit(status)


def chat_prompt(llm: "LLM", message: str, system: str | None) -> list[int]:
    """The token ids of `message` as the model's chat template renders it, ready to be answered."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": message})
    return llm.tokenizer.encode_chat(messages, add_generation_prompt=True)[1]


def _run_json(llm: "LLM", text: str, token_ids: list[int] | None, params: "SamplingParams", watch: Watch) -> int:
    from forge.views.blocks import BlockScreen, blocks_object
    from forge.views.json_output import run_object, to_json
    from forge.views.terminal import open_console

    screen, blocks = BlockScreen(), []

    def look(record: "StepRecord") -> None:
        if record.blocks is not None:
            blocks.append(blocks_object(record, screen.feed(record), screen.names))

    result = drive(llm, llm.start([token_ids or text], params), params, look, watch)
    found = run_object(result, llm.tokenizer.token_text) | {"prompt": text}
    if llm.engine.report_blocks:
        found["blocks"] = blocks
    open_console().print(to_json(found), soft_wrap=True)
    return exit_status(result)


def _run_shown(
    llm: "LLM",
    text: str,
    token_ids: list[int] | None,
    params: "SamplingParams",
    watch: Watch,
    echo: bool,
    prompt_logprobs: int | None,
    pace: float,
) -> int:
    from forge.views.blocks import BlockGeneration
    from forge.views.generation import GenerationView, generation_view
    from forge.views.logprobs import print_logprobs
    from forge.views.terminal import open_console

    console = open_console()
    shown = text if token_ids is None or echo else ""
    if llm.engine.report_blocks:
        following: BlockGeneration | GenerationView = BlockGeneration(console, shown, echo, pace)
    else:
        following = generation_view(console, run_label(llm), shown, echo)
    with following as view:
        result = drive(llm, llm.start([token_ids or text], params), params, view.step, watch)
        view.finish(result)
    print_logprobs(console, result.output, params.logprobs, prompt_logprobs, llm.tokenizer.token_text)
    return exit_status(result)
