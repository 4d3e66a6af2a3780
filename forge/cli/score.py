"""`forge score` and `forge logprobs`: how likely a text is, token by token, from one forward pass."""

from typing import Annotated

import typer

from forge.cli import options
from forge.cli.arguments import command
from forge.cli.options import AnsweringEngine
from forge.cli.run_control import create_llm
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.views.answers import score_object, score_screen
from forge.views.progress import CountingBar
from forge.views.report import Report
from forge.views.screen import report
from forge.views.terminal import open_error_console

_TOP = typer.Option("--top", help="List this many of the likeliest tokens at each place.", rich_help_panel="Output")


@command
def score(
    engine: AnsweringEngine,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What comes before; may be empty.")],
    continuation: Annotated[str, typer.Argument(metavar="CONTINUATION", help="What is scored; - reads stdin.")],
    top: Annotated[int, _TOP] = 0,
) -> Report:
    """The log-probability of each token of a continuation, their total, and the perplexity.

    [dim]forge score "Once upon a time" ", when the first snow fell"[/dim]
    """
    return _scored(engine, prompt, options.read_prompt(continuation), top)


@command
def logprobs(
    engine: AnsweringEngine,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What is scored; - reads standard input.")],
    top: Annotated[int, _TOP] = 5,
) -> Report:
    """The log-probability of every token of a text, and what else could have stood there.

    [dim]forge logprobs "Once upon a time" --top 5[/dim]
    """
    return _scored(engine, "", options.read_prompt(text), top)


def _scored(engine_args: EngineArgs, prompt: str, continuation: str, top: int) -> Report:

    if top < 0:
        raise UsageError(f"--top is a number of tokens, and not {top}")
    llm = create_llm(engine_args)
    top = min(top, llm.model.vocab_size)
    with CountingBar(open_error_console(), "score") as on_progress:
        (scored,) = llm.score([(prompt, continuation)], top, on_progress=on_progress)
    token_text = llm.tokenizer.token_text
    facts = {"model": llm.model_name, "prompt": prompt, "continuation": continuation}
    return report(
        facts | score_object(scored, token_text),
        lambda: score_screen(prompt, scored, top, token_text),
    )
