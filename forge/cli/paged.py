"""`forge paged`: chapter 4. Its experiment: how many stories fit into the same memory, in runs and in blocks?"""

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.arrivals import Arrival, drive_arrivals, watch_arrivals, whole
from forge.cli.bugs import BugOption, run_bug
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.running import Found, load_model

if TYPE_CHECKING:
    from forge.llm import LLM
    from forge.views.paged import PoolRun
    from forge.views.report import Report

_SIZES = "Sizes"
LENGTHS = (0.5, 0.06, 0.25, 0.9, 0.12, 0.4)
"""What the stories grow to, as shares of the longest that there may be; in turn, over and over."""
ARRIVE_EVERY = 3
"""Steps between one story and the next."""
PACE = 40.0
TIMES = 3


def paged(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    sequences: Annotated[
        int, typer.Option("--sequences", help="Stories, of different lengths.", rich_help_panel=_SIZES)
    ] = 12,
    num_blocks: Annotated[int, typer.Option("--num-blocks", help="The pool.", rich_help_panel=_SIZES)] = 64,
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens per block.", rich_help_panel=_SIZES)] = 16,
    max_model_len: Annotated[
        int,
        typer.Option("--max-model-len", help="Tokens that a story may have, at most.", rich_help_panel=_SIZES),
    ] = 256,
    model: options.ModelOption = "tales",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    pace: options.PaceOption = PACE,
    only: OnlyOption = None,
    pause: PauseOption = True,
    bug: BugOption = None,
    json: options.JsonOption = False,
) -> Found:
    """4. The cache as virtual memory: a pool of blocks instead of one run per sequence.

    [dim]forge paged --only run --num-blocks 96 --sequences 16[/dim]
    """
    from forge.errors import UsageError

    if bug is not None:
        return run_bug("paged", bug, device, threads, json)
    if reads_chapter(only, json):
        return read_chapter(ctx, pause)
    if sequences < 1:
        raise UsageError(f"--sequences is at least 1, and {sequences} is less")
    text, pace = options.read_prompt(prompt), options.checked_pace(pace)
    loading = options.model_options(
        device=device, threads=threads, block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len
    )
    report = _measure(text, sequences, model, loading, pace, json)
    return report.as_json() if json else report


def _measure(prompt: str, sequences: int, model: str, loading: dict, pace: float, quiet: bool) -> "Report":
    from forge.views.paged import PagedExperiment, paged_object, print_paged
    from forge.views.report import Report

    runs: dict[str, PoolRun] = {}
    for kind in ("basic", "paged"):
        llm = load_model(model, kv=kind, max_num_seqs=sequences, **loading)
        runs[kind] = _watch_and_measure(llm, _stories(llm, prompt, sequences), pace, quiet)
    experiment = PagedExperiment(prompt, llm.max_model_len, llm.kv_layout.bytes_per_token, runs["basic"], runs["paged"])
    return Report(paged_object(experiment), lambda console: print_paged(console, experiment))


def _stories(llm: "LLM", prompt: str, sequences: int) -> list[Arrival]:
    """Requests that grow to different lengths and come one after another."""
    room = llm.max_model_len - len(llm.tokenizer.encode(prompt))
    params = [
        options.sampling_params(
            max_tokens=max(1, int(room * LENGTHS[story % len(LENGTHS)])), temperature=0.8, seed=story, ignore_eos=True
        )
        for story in range(sequences)
    ]
    return [Arrival(prompt, params[story], story * ARRIVE_EVERY) for story in range(sequences)]


def _watch_and_measure(llm: "LLM", arrivals: list[Arrival], pace: float, quiet: bool) -> "PoolRun":
    """Once to be seen, which warms up too, and then to be timed."""
    from forge.views.blocks import BlockScreen
    from forge.views.paged import QUESTION, PoolRun

    screen = BlockScreen(QUESTION)
    watched = watch_arrivals(llm, arrivals, screen, pace, quiet)
    timed = [whole(drive_arrivals(llm, arrivals)) for _ in range(TIMES)]
    return PoolRun(screen, watched, min(timed, key=lambda result: result.seconds))
