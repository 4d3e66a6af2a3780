"""`forge generate`: continue a prompt, and watch what every forward costs."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.options import FormArgs, OutputArgs
from forge.cli.run_control import StepSubscriber, create_llm, drive, exit_status, run_label
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.views.generation import generation_view
from forge.views.run_view import RunView
from forge.views.screen import draw
from forge.views.terminal import open_console

if TYPE_CHECKING:
    from forge.llm import LLM

_PROMPT = "Prompt"


@command
def generate(
    prompt: options.PromptArgument,
    sampling: Annotated[SamplingParams, Takes(without="max_tokens")],
    form: FormArgs,
    engine_args: EngineArgs,
    output: Annotated[OutputArgs, Takes(without="svg lines")],
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message.", rich_help_panel=_PROMPT)
    ] = False,
    system: Annotated[
        str | None, typer.Option("--system", help="System message; implies --chat.", rich_help_panel=_PROMPT)
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt too.", rich_help_panel="Output")] = False,
) -> None:
    """Continue a prompt, and watch what every forward costs.

    [dim]forge generate --kv basic "Once upon a time" 32[/dim]

    [dim]forge generate --kv paged --num-blocks 64 --show blocks "Once upon a time" 64[/dim]

    [dim]forge generate --choice happy --choice sad "The fox had lost his lantern. He was"[/dim]
    """
    text, prompt_logprobs = options.read_prompt(prompt), sampling.prompt_logprobs
    if prompt_logprobs is None and echo and max_tokens == 0:
        sampling = replace(sampling, prompt_logprobs=0)
    params = replace(sampling, max_tokens=max_tokens, structured=form.structured_output())
    subscriber = StepSubscriber(output.trace, output.step)
    llm = create_llm(engine_args)
    llm.engine.scheduler.keep_block_map = output.show == "blocks"
    llm.engine.report_probabilities = output.json or subscriber.is_on
    token_ids = chat_prompt(llm, text, system) if chat or system is not None else None

    shown = text if output.json or token_ids is None or echo else ""
    with _view(llm, shown, echo, output) as view:
        run = llm.start([token_ids or text], params)
        result = drive(llm, run, view.step, subscriber, sampled=not params.greedy)
        view.finish(result)
    if not output.json:
        from forge.views.answers import logprobs_screen

        draw(open_console(), logprobs_screen(result.output, params.logprobs, prompt_logprobs, llm.tokenizer.token_text))
    raise typer.Exit(exit_status(result))


def chat_prompt(llm: "LLM", message: str, system: str | None) -> list[int]:
    """Return the token ids of `message` as the model's chat template renders it, ready to be answered."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": message})
    return llm.tokenizer.encode_chat(messages, add_generation_prompt=True)[1]


def _view(llm: "LLM", prompt: str, echo: bool, output: OutputArgs) -> RunView:
    console, shows_blocks = open_console(), output.show == "blocks"
    if not (output.json or shows_blocks):
        return generation_view(console, run_label(llm), prompt, echo)
    from forge.views.blocks import BlockGeneration, JsonGeneration

    if output.json:
        return JsonGeneration(console, prompt, llm.tokenizer.token_text, shows_blocks)
    return BlockGeneration(console, prompt, echo, output.pace)
