"""`forge engines`: change the engines of a server that runs, while it answers."""

from pathlib import Path
from typing import Annotated

import typer

from forge.errors import UsageError


def engines(
    name: Annotated[str, typer.Argument(help="What the server is called: its --name.", show_default=False)],
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Engines that answer; with autoscaling, at least.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model that every engine loads, one after another.")
    ] = None,
) -> None:
    """Change how many engines a server has (Ray Serve), or their model. No request fails.

    [dim]forge engines tales --replicas 4[/dim]
    """
    from forge.cluster.control import Change, ask_for_change

    if replicas is None and model is None:
        raise UsageError("say what is to be different: --replicas, --model or both")
    if model is not None and Path(model).exists():
        model = str(Path(model).absolute())
    ask_for_change(name, Change(replicas, model))
