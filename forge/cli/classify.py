"""`forge classify`: which of several labels a text gets, and how sure the model is, from one forward pass."""

from typing import Annotated

import typer

from forge.cli import options
from forge.cli.arguments import command
from forge.cli.options import AnsweringEngine
from forge.cli.run_control import create_llm
from forge.engine.tasks import classify_prompt
from forge.errors import UsageError
from forge.views.answers import classification_object, classification_screen
from forge.views.progress import CountingBar
from forge.views.report import Report
from forge.views.screen import report
from forge.views.terminal import open_error_console

_LABELS_NEEDED = "--labels takes two labels or more with commas: --labels happy,sad"


@command
def classify(
    engine: AnsweringEngine,
    texts: options.TextsArgument = None,
    labels: Annotated[
        str,
        typer.Option(
            "--labels",
            help="The labels, with commas.",
            show_default="those of the model's classification head",
            rich_help_panel="Texts",
        ),
    ] = "",
    question: Annotated[
        str | None,
        typer.Option(
            "--question",
            help="What is asked about each text.",
            show_default="which of the labels it is, in one word",
            rich_help_panel="Texts",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="A text is the whole prompt, and nothing is asked.", rich_help_panel="Texts")
    ] = False,
    file: options.FileOption = None,
) -> Report:
    """Label probabilities of texts, from one forward pass each.

    [dim]forge classify --labels happy,sad "The mole lost his crown, and he wept all night."[/dim]

    [dim]forge classify --labels happy,sad --file stories.txt[/dim]

    A model with a classification head has labels of its own and reads each text as it is.
    """
    names = [name.strip() for name in labels.split(",") if name.strip()]
    if len(names) == 1:
        raise UsageError(_LABELS_NEEDED)
    inputs = options.read_texts(texts, file)
    llm = create_llm(engine)
    by_head = bool(llm.model.labels) and not names
    if not names and not by_head:
        raise UsageError(_LABELS_NEEDED)
    raw = raw or by_head
    prompts = inputs if raw else [classify_prompt(llm.tokenizer, text, names, question) for text in inputs]
    with CountingBar(open_error_console(), "classify") as on_progress:
        classifications = llm.classify(prompts, names, on_progress=on_progress)
    return report(
        {"model": llm.model_name, "results": classification_object(inputs, classifications)},
        lambda: classification_screen(inputs, classifications),
    )
