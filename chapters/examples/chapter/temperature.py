"""11. Temperature: how far does a drawn text follow the likeliest one?

[dim]forge temperature --only run "Once upon a time" 32[/dim]
"""

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.run_control import Found, load_model
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.views.charts import bar
from forge.views.formatting import count
from forge.views.json_output import as_object
from forge.views.palette import ACCENT, TITLE
from forge.views.report import Report
from forge.views.terminal import new_table, print_lines, print_table

QUESTION = "How far does a drawn text follow the likeliest one?"
TEMPERATURES = (0.1, 0.4, 0.7, 1.0, 1.3)


@command
def temperature(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = 32,
    *,
    engine: Annotated[EngineArgs, Takes("model")],
    only: OnlyOption = None,
    pause: PauseOption = True,
    json: options.JsonOption = False,
) -> Found:
    if reads_chapter(only, json):
        return read_chapter(ctx, pause)
    result = _measure(options.read_prompt(prompt), max_tokens, engine)
    report = Report(as_object(result), lambda console: _draw(console, result))
    return report.as_json() if json else report


@dataclass(frozen=True)
class Drawn:
    """The text at one temperature."""

    temperature: float
    in_common: int
    """Tokens before the first that greedy decoding does not choose."""
    text: str


@dataclass(frozen=True)
class Result:
    """The facts: what `--json` prints, and what the chapter's text may name."""

    max_tokens: int
    drawn: tuple[Drawn, ...]


def _measure(prompt: str, max_tokens: int, engine: EngineArgs) -> Result:
    llm, drawn = load_model(engine), []
    greedy: tuple[int, ...] = ()
    for degree in (0.0, *TEMPERATURES):
        params = SamplingParams(max_tokens=max_tokens, temperature=degree, seed=0, ignore_eos=True)
        output = llm.generate(prompt, params)[0].outputs[0]
        greedy = greedy or output.token_ids
        same = [ours == likeliest for ours, likeliest in zip(output.token_ids, greedy, strict=True)]
        drawn.append(Drawn(degree, [*same, False].index(False), output.text))
    return Result(max_tokens, tuple(drawn))


def _draw(console: Console, result: Result) -> None:
    print_lines(console, [Text(QUESTION, TITLE), Text("")])
    table = new_table(None, "temperature", "in common", last="")
    for one in result.drawn:
        table.add_row(
            str(one.temperature), count(one.in_common), Text(bar(one.in_common, result.max_tokens, 40), ACCENT)
        )
    print_table(console, table)
