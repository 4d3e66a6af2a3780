"""`forge compare` for many requests that begin alike: two sides that differ in how they are planned, or in what of
their beginnings stays cached."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge.cli.arguments import make
from forge.cli.run_control import create_llm, run_label
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.views.report import Report
from forge.views.screen import report
from forge.workload.judging import judge_prompts, returning_prompts, run_requests

if TYPE_CHECKING:
    from forge.cli.versus import Versus
    from forge.llm import LLM

CLASSES = {"generation": False, "prefill-only": True}
"""`--class`: whether a generation of one token is prefill-only."""
EVICTION = "--evict"
RETURNING = 4
"""Callers at once where the option is `--evict`: what others have cached is evicted between two of their requests."""
_QUESTIONS = {
    "--class": "What does a generation's life cost a request that wants one token?",
    "--prefix-planning": "What does it save when requests wait for what one of them computes?",
    EVICTION: "Which cached block should go, so that least is computed again?",
}
_WARM_UP = 2
"""Requests that are not timed."""


def is_judging(versus: "Versus") -> bool:
    """Return whether a comparison is one of requests that begin alike."""
    return versus.option in _QUESTIONS


def compare_judging(left: Mapping[str, Any], versus: "Versus", texts: Sequence[str] | None, max_tokens: int) -> Report:
    """Run the texts, or `--requests` judge requests, on both sides: all at once, or a few at a time where the question
    is what stays cached between them."""
    from forge.views.progress import progress_line
    from forge.views.request_sets import judging_object, judging_screen, same_answers

    for side in (left, versus.right):  # before anything is loaded
        _config(side)
    runs, labels, tokens = [], [], 0
    made_up, concurrency = (returning_prompts, RETURNING) if versus.option == EVICTION else (judge_prompts, None)
    with progress_line() as progress:
        for name, side in zip(versus.names, (left, versus.right), strict=True):
            progress(name)
            llm = _load_side(side)
            prompts = made_up(llm.tokenizer, side["requests"] or 64) if texts is None else _encoded(llm, texts)
            run_requests(llm.new_engine(), prompts[:_WARM_UP], max_tokens)
            runs.append(run_requests(llm.engine, prompts, max_tokens, concurrency))
            labels.append(run_label(llm))
            tokens = sum(map(len, prompts))
    question = _QUESTIONS[versus.option]
    return report(
        {"option": versus.option, **judging_object(labels[0], versus.names, runs, tokens)},
        lambda: judging_screen(question, labels[0], versus.names, runs, tokens, concurrency),
        0 if same_answers(runs) else 1,
    )


def _load_side(side: Mapping[str, Any]) -> "LLM":
    llm = create_llm(make(EngineArgs, {**side, "max_num_seqs": side["batch"]}, **_config(side)))
    return llm


def _config(side: Mapping[str, Any]) -> dict[str, bool]:
    """Return the options that `--class` means for a scheduler."""
    value = side["execution_class"]
    if value not in CLASSES:
        raise UsageError(f"--class is {' or '.join(CLASSES)}, and not {value!r}")
    return {"prefill_only": CLASSES[value]}


def _encoded(llm: "LLM", texts: Sequence[str]) -> list[list[int]]:
    return [list(llm.tokenizer.encode(text)) for text in texts]
