"""`forge chat`: a conversation that keeps its cache between turns, so that each turn computes only what is new."""

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.arguments import Takes, command
from forge.cli.options import OutputArgs
from forge.cli.run_control import StepSubscriber, create_llm, drive, interruption, run_label
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import ForgeError
from forge.views.terminal import open_console

if TYPE_CHECKING:
    from forge.llm import LLM, ChatSession
    from forge.views.chat import ChatView


@command
def chat(
    sampling: Annotated[SamplingParams, Takes(without="n logprobs prompt_logprobs", max_tokens=256)],
    engine_args: Annotated[EngineArgs, Takes(kv="basic")],
    output: Annotated[OutputArgs, Takes("show trace step")],
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
) -> None:
    """Talk with a model. Its cache stays between turns: a turn computes only what is new.

    /fork marks a place in the conversation, /back returns to it, /reset forgets the conversation, /exit or Ctrl-D ends
    it. Ctrl-C ends an answer, or clears the line that is being typed; a second one ends the conversation.
    """
    from forge.views.chat import ChatView

    subscriber = StepSubscriber(output.trace, output.step)
    llm = create_llm(engine_args)
    llm.engine.scheduler.keep_block_map = output.show == "blocks"
    view = ChatView(open_console(), run_label(llm))
    view.welcome()
    _converse(llm, llm.chat_session(system), sampling, view, subscriber)


def _converse(
    llm: "LLM", session: "ChatSession", params: SamplingParams, view: "ChatView", subscriber: StepSubscriber
) -> None:
    """Read messages until there are no more."""
    while (message := view.ask()) is not None:
        if message in ("/exit", "/quit"):
            return
        if message == "/reset":
            session.reset()
            view.forgotten()
        elif message == "/fork":
            used = llm.engine.cache.stats().used_blocks
            session.fork()
            more = llm.engine.cache.stats().used_blocks - used
            view.forked(session.depth, session.tokens_held, more, repr(llm.engine.cache))
        elif message == "/back":
            try:
                session.back()
            except ForgeError as error:
                view.trouble(str(error))
                continue
            view.went_back(session.depth + 1, session.tokens_held, repr(llm.engine.cache))
        elif message.startswith("/"):
            view.help()
        elif message:
            with interruption():  # before the first step and after the last, Ctrl-C has nothing to end
                try:
                    run = session.send(message, params)
                except ForgeError as error:
                    view.trouble(str(error))
                    continue
                view.finish(drive(llm, run, view.step, subscriber, not params.greedy))
