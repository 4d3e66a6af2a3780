"""What the commands share whose answers come from one forward pass: a model around a cache that shares prefixes, and a
bar on standard error where there are many inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forge.cli import options
from forge.cli.running import load_model

if TYPE_CHECKING:
    from forge.llm import LLM


def load_answering(model: str, **given: Any) -> "LLM":
    """The model with a prefix cache: what several inputs begin with is computed once."""
    llm = load_model(model, kv="prefix", **options.model_options(**given))
    llm.engine.report_probabilities = False  # they are not shown
    return llm


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    from forge.views.counting import CountingBar
    from forge.views.terminal import open_error_console

    with CountingBar(open_error_console(), what) as bar:
        yield bar
