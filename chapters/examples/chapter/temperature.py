"""13. Temperature: how far does a drawn text follow the likeliest one?

[dim]forge temperature --only run "Once upon a time" 32[/dim]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from forge.cli import options
from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.run_control import create_llm
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.views.charts import bar
from forge.views.json_output import as_object
from forge.views.palette import ACCENT
from forge.views.screen import Part, Report, Table, question, report

QUESTION = "How far does a drawn text follow the likeliest one?"
TEMPERATURES = (0.1, 0.4, 0.7, 1.0, 1.3)


@experiment()
def temperature(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = 32,
    *,
    engine: Annotated[EngineArgs, Takes("model")],
) -> Experiment:
    return Experiment(lambda: _measure(options.read_prompt(prompt), max_tokens, engine))


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


def _measure(prompt: str, max_tokens: int, engine: EngineArgs) -> Report:
    llm, drawn = create_llm(engine), []
    greedy: tuple[int, ...] = ()
    for degree in (0.0, *TEMPERATURES):
        params = SamplingParams(max_tokens=max_tokens, temperature=degree, seed=0, ignore_eos=True)
        output = llm.generate(prompt, params)[0].outputs[0]
        greedy = greedy or output.token_ids
        same = [ours == likeliest for ours, likeliest in zip(output.token_ids, greedy, strict=True)]
        drawn.append(Drawn(degree, [*same, False].index(False), output.text))
    result = Result(max_tokens, tuple(drawn))
    return report(as_object(result), lambda: _screen(result))


def _screen(result: Result) -> Iterator[Part]:
    yield from question(QUESTION)
    columns = ("temperature: {temperature}", "in common: {in_common:count}", ": {in_common:bar}")
    bars = {"bar": lambda tokens: bar(tokens, result.max_tokens, 40)}
    yield Table.of(result.drawn, *columns, formats=bars, names=0, lefts=(2,), styles={2: ACCENT})
