"""`forge prefix`: chapter 5. Its experiment: a story forks in the middle of a block, and a rubric is read only once."""

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.arrivals import Arrival, drive_arrivals, watch_arrivals, whole
from forge.cli.bugs import BugOption, run_bug
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.running import Found, forget_prefixes, load_model

if TYPE_CHECKING:
    from forge.engine.llm import LLM
    from forge.views.prefix import Fork, RubricRun
    from forge.views.report import Report

_SIZES = "Sizes"
STORY_TOKENS = 48
LEAD = 6
"""Tokens by which the story is past the branching point when the branches come."""
ANSWER_TOKENS = 12
PACE = 8.0
RUBRIC = (
    "You read a story and then answer a question about it. Answer with one word, and take it from the story. "
    "The story: The fox lived in a den under an old oak, and every evening a little turtle came to visit. One day the "
    "turtle lent the fox a lantern. The fox took it to the bridge to show it to the birds, but a storm came, and the "
    "lantern fell into the river. The fox told the truth, and the turtle forgave him.\n"
)
QUESTIONS = (
    "Question: Who came to visit? Answer:",
    "Question: What fell into the river? Answer:",
    "Question: Where did the fox live? Answer:",
    "Question: Who told the truth? Answer:",
)


def prefix(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = STORY_TOKENS,
    branches: Annotated[
        int, typer.Option("--branches", help="Ways in which the story goes on.", rich_help_panel=_SIZES)
    ] = 3,
    branch_at: Annotated[
        int | None,
        typer.Option(
            "--branch-at",
            help="Output tokens that the branches share with the story.",
            show_default="half of it, to the middle of a block",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", help="Requests that share the rubric.", rich_help_panel=_SIZES)
    ] = 4,
    rubric: Annotated[
        str | None,
        typer.Option("--rubric", help="A file with the text that they share.", rich_help_panel="Prompt"),
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens per block.", rich_help_panel=_SIZES)] = 16,
    num_blocks: Annotated[int, typer.Option("--num-blocks", help="The pool.", rich_help_panel=_SIZES)] = 64,
    model: options.ModelOption = "tales",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    pace: options.PaceOption = PACE,
    only: OnlyOption = None,
    pause: PauseOption = True,
    bug: BugOption = None,
    json: options.JsonOption = False,
) -> Found:
    """5. Prefix reuse: what was computed once serves all that begin alike.

    [dim]forge prefix --only run --branches 5 --requests 8[/dim]
    """
    from forge.errors import UsageError

    if bug is not None:
        return run_bug("prefix", bug, device, threads, json)
    if reads_chapter(only, json):
        return read_chapter(ctx, pause)
    for name, value, least in (("--branches", branches, 1), ("--requests", requests, 2), ("MAX_TOKENS", max_tokens, 4)):
        if value < least:
            raise UsageError(f"{name} is at least {least}, and {value} is less")
    if branch_at is not None and not 0 < branch_at < max_tokens:
        raise UsageError(f"--branch-at is between 1 and {max_tokens - 1}, a place in the story, and {branch_at} is not")
    text, pace = options.read_prompt(prompt), options.checked_pace(pace)
    shared = RUBRIC if rubric is None else options.read_text(rubric)
    loading = options.model_options(
        device=device,
        threads=threads,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max(16, branches + 1, requests),
    )
    report = _measure(text, max_tokens, branches, branch_at, shared, requests, model, loading, pace, json)
    return report.as_json() if json else report


def _measure(
    prompt: str,
    max_tokens: int,
    branches: int,
    branch_at: int | None,
    rubric: str,
    requests: int,
    model: str,
    loading: dict,
    pace: float,
    quiet: bool,
) -> "Report":
    from forge.views.prefix import PrefixExperiment, prefix_object, print_prefix
    from forge.views.report import Report

    llm = load_model(model, kv="prefix", **loading)
    fork = _fork_story(llm, prompt, max_tokens, branches, branch_at, pace, quiet)
    texts = [rubric + QUESTIONS[number % len(QUESTIONS)] for number in range(requests)]
    shared = _share_rubric(llm, texts, pace, quiet)
    alone = _share_rubric(load_model(model, kv="paged", **loading), texts, 0.0, quiet=True)
    experiment = PrefixExperiment(prompt, fork, len(llm.tokenizer.encode(rubric)), alone, shared)
    return Report(prefix_object(experiment), lambda console: print_prefix(console, experiment))


def _fork_story(
    llm: "LLM", prompt: str, max_tokens: int, branches: int, branch_at: int | None, pace: float, quiet: bool
) -> "Fork":
    """Let a story run, and others begin as it did when it is a little past the branching point."""
    from forge.views.blocks import BlockScreen
    from forge.views.prefix import FORK_QUESTION, Fork

    greedy = options.sampling_params(max_tokens=max_tokens, ignore_eos=True)
    story = whole(drive_arrivals(llm, [Arrival(prompt, greedy, 0)])).outputs[0]  # what it will say
    start = len(story.prompt_token_ids)
    place = branch_at if branch_at is not None else _middle_of_a_block(start, max_tokens, llm.engine.cache.block_size)
    beginning = [*story.prompt_token_ids, *story.outputs[0].token_ids[:place]]
    drawn = options.sampling_params(
        max_tokens=max(1, max_tokens - place), temperature=0.9, seed=1, n=branches, ignore_eos=True
    )
    arrivals = [Arrival(prompt, greedy, 0), Arrival(beginning, drawn, min(place + LEAD, max_tokens - 1))]
    forget_prefixes(llm)
    screen = BlockScreen(FORK_QUESTION)
    result = watch_arrivals(llm, arrivals, screen, pace, quiet)
    forget_prefixes(llm)
    return Fork(screen, result, place, llm.tokenizer.decode(beginning))


def _middle_of_a_block(start: int, max_tokens: int, block_size: int) -> int:
    """About half of the story; where that shares only whole blocks, half a block further on or back.

    The last of the tokens that are shared is computed anew, for its logits.
    """
    place = max(1, max_tokens // 2)
    offset = (start + place - 1) % block_size
    shifted = place + block_size // 2 - offset
    return shifted if 0 < shifted < max_tokens - 1 else place


def _share_rubric(llm: "LLM", texts: list[str], pace: float, quiet: bool) -> "RubricRun":
    """Requests that come one step after another, once to be seen and then to be timed."""
    from forge.views.blocks import BlockScreen
    from forge.views.prefix import RUBRIC_QUESTION, RubricRun

    params = options.sampling_params(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    arrivals = [Arrival(text, params, step) for step, text in enumerate(texts)]
    screen = BlockScreen(RUBRIC_QUESTION)
    watched = watch_arrivals(llm, arrivals, screen, pace, quiet)
    timed = []
    for _ in range(3):
        forget_prefixes(llm)
        timed.append(whole(drive_arrivals(llm, arrivals)))
    return RubricRun(screen, watched, min(timed, key=lambda result: result.seconds))
