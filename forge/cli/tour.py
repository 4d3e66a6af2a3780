"""`forge tour`: a poster of one request, from HTTP to a token and back."""

from typing import Annotated

import typer

from forge.cli.arguments import Takes, command
from forge.cli.options import OutputArgs
from forge.cli.run_control import Found
from forge.engine_args import EngineArgs


@command
def tour(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the request says.")] = "Once upon a time",
    max_tokens: Annotated[int, typer.Argument(metavar="MAX_TOKENS", help="Tokens to generate.", min=1)] = 8,
    *,
    engine_args: Annotated[EngineArgs, Takes("model")],
    output: Annotated[OutputArgs, Takes("svg json")],
) -> Found:
    """Follow one request from HTTP to a token and back, with file and function at each station.

    [dim]forge tour --svg tour.svg[/dim]
    """
    from forge.book.tour import print_tour, take_tour
    from forge.cli.serve import require_server
    from forge.cli.watch import steps_of
    from forge.errors import UsageError
    from forge.views.screen import Report

    if not prompt:
        raise UsageError("the prompt is empty: give it at least one word")
    require_server()
    findings = take_tour(str(engine_args.model), prompt, max_tokens, lambda url: steps_of(url, None))
    if output.svg is not None:
        from forge.views.picture import picture_console, save_picture

        console = picture_console()
        print_tour(console, findings)
        save_picture(console, output.svg, "forge tour")
    return Report(findings.as_json(), lambda console: print_tour(console, findings))
