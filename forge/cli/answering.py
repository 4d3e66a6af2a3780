"""What the commands share whose answers come from one forward pass: a model around a cache that shares prefixes, and a
bar on standard error where there are many inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from forge.cli.arguments import Takes
from forge.cli.run_control import create_llm
from forge.engine_args import EngineArgs
from forge.views.progress import CountingBar
from forge.views.terminal import open_error_console

if TYPE_CHECKING:
    from forge.llm import LLM

AnsweringEngine = Annotated[EngineArgs, Takes("model Model prefill_only_tokens prefill_only_memory", kv="prefix")]
"""What several inputs begin with is computed once."""


def load_answering(engine_args: EngineArgs) -> "LLM":
    llm = create_llm(engine_args)
    return llm


@contextmanager
def counting(label: str) -> Iterator[Callable[[int, int], None]]:

    with CountingBar(open_error_console(), label) as bar:
        yield bar
