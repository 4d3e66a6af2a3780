"""`forge generate`: continue a prompt, and watch what every forward costs."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.options import FormArgs, OutputArgs
from forge.cli.run_control import StepSubscriber, create_llm, drive, exit_status, run_label
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.views.generation import generation_view
from forge.views.json_output import run_object, to_json
from forge.views.progress import RunView
from forge.views.screen import draw
from forge.views.summary import RunResult
from forge.views.terminal import open_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from forge.llm import LLM
    from forge.trace.records import StepRecord

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

    def run(on_step: "Callable[[StepRecord], None]") -> RunResult:
        return drive(llm, llm.start([token_ids or text], params), on_step, subscriber, not params.greedy)

    if output.json:
        result = _print_json(llm, text, run)
    else:
        from forge.views.answers import logprobs_screen

        console, shown = open_console(), text if token_ids is None or echo else ""
        with _view(llm, console, shown, echo, output.pace) as view:
            result = run(view.step)
            view.finish(result)
        draw(console, logprobs_screen(result.output, params.logprobs, prompt_logprobs, llm.tokenizer.token_text))
    raise typer.Exit(exit_status(result))


def chat_prompt(llm: "LLM", message: str, system: str | None) -> list[int]:
    """Return the token ids of `message` as the model's chat template renders it, ready to be answered."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": message})
    return llm.tokenizer.encode_chat(messages, add_generation_prompt=True)[1]


def _print_json(llm: "LLM", text: str, run: "Callable[[Callable[[StepRecord], None]], RunResult]") -> RunResult:
    from forge.views.blocks import BlockScreen, blocks_object

    screen, blocks = BlockScreen(), []

    def look(record: "StepRecord") -> None:
        if record.blocks is not None:
            blocks.append(blocks_object(record, screen.feed(record), screen.names))

    result = run(look)
    record = run_object(result, llm.tokenizer.token_text) | {"prompt": text}
    if llm.engine.scheduler.keep_block_map:
        record["blocks"] = blocks
    open_console().print(to_json(record), soft_wrap=True)
    return result


def _view(llm: "LLM", console: Console, prompt: str, echo: bool, pace: float) -> RunView:
    from forge.views.blocks import BlockGeneration

    if llm.engine.scheduler.keep_block_map:
        return BlockGeneration(console, prompt, echo, pace)
    return generation_view(console, run_label(llm), prompt, echo)
