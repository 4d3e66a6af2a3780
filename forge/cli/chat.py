"""`forge chat`: a conversation that keeps its cache between turns, so that each turn computes only what is new."""

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.running import Watch, drive, load_model, run_label

if TYPE_CHECKING:
    from forge.engine.sampling_params import SamplingParams
    from forge.llm import LLM, ChatSession
    from forge.views.chat import ChatView


def chat(
    model: options.ModelOption = "tales",
    kv: options.KvOption = "basic",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = None,
    num_blocks: options.NumBlocksOption = None,
    kv_memory: options.KvMemoryOption = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of one answer at most.")] = 256,
    temperature: options.TemperatureOption = 0.0,
    top_p: options.TopPOption = 1.0,
    top_k: options.TopKOption = 0,
    min_p: options.MinPOption = 0.0,
    repetition_penalty: options.RepetitionPenaltyOption = 1.0,
    seed: options.SeedOption = None,
    stop: options.StopOption = None,
    show: options.ShowOption = None,
    trace: options.TraceOption = None,
    step: options.StepOption = False,
) -> None:
    """Talk with a model. Its cache stays between turns: a turn computes only what is new.

    /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer.
    """
    from forge.views.chat import ChatView
    from forge.views.terminal import open_console

    params = options.sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    blocks = options.shows_blocks(show, kv)
    loading = options.model_options(
        kv=kv,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
    )
    watch = Watch(trace, step)
    llm = load_model(model, **loading)
    llm.engine.report_blocks = blocks
    view = ChatView(open_console(), run_label(llm))
    view.welcome()
    _converse(llm, llm.chat_session(system), params, view, watch)


def _converse(llm: "LLM", session: "ChatSession", params: "SamplingParams", view: "ChatView", watch: Watch) -> None:
    """Read messages until there are no more."""
    from forge.errors import ForgeError

    while (message := view.ask()) is not None:
        if message in ("/exit", "/quit"):
            return
        if message == "/reset":
            session.reset()
            view.forgotten()
        elif message.startswith("/"):
            view.help()
        elif message:
            try:
                run = session.send(message, params)
            except ForgeError as error:
                view.trouble(str(error))
                continue
            view.finish(drive(llm, run, params, view.step, watch))
