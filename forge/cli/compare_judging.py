"""`forge compare` for many requests at once: two sides that differ in how requests are planned."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge.cli import options
from forge.cli.running import load_model, run_label
from forge.errors import UsageError

if TYPE_CHECKING:
    from forge.cli.versus import Versus
    from forge.llm import LLM
    from forge.views.report import Report

LIVES = {"decode": False, "oneshot": True}
"""`--class`: whether a generation of one token is prefill-only."""
PLANNING = {"off": False, "on": True}
_QUESTIONS = {
    "--class": "What does a generation's life cost a request that wants one token?",
    "--planning": "What does it save when requests wait for what one of them computes?",
}
_LOADING = (
    "kv", "device", "threads", "max_model_len", "block_size", "num_blocks", "kv_memory", "kv_dtype", "quantize",
    "invariant",
)  # fmt: skip
_WARM_UP = 2
"""Requests that are not timed."""


def is_judging(versus: "Versus") -> bool:
    """Whether a comparison is one of how requests are planned."""
    return versus.option in _QUESTIONS


def compare_judging(
    given: Mapping[str, Any], versus: "Versus", texts: Sequence[str] | None, max_tokens: int
) -> "Report":
    """Run the texts, or `--requests` judge requests, all at once on both sides."""
    from forge.bench.judging import judge_prompts, run_requests
    from forge.views.bench import BenchProgress
    from forge.views.judging import identical, judging_object, print_judging
    from forge.views.report import Report
    from forge.views.terminal import open_error_console

    if texts is not None and given["requests"] is not None:
        raise UsageError("--requests makes requests up and --prompts reads them: give one of the two")
    for side in (given, versus.right):  # before anything is loaded
        _config(side)
    runs, labels, tokens = [], [], 0
    with BenchProgress(open_error_console()) as progress:
        for name, side in zip(versus.names, (given, versus.right), strict=True):
            progress(name)
            llm = _load_side(side)
            prompts = judge_prompts(llm.tokenizer, side["requests"] or 64) if texts is None else _encoded(llm, texts)
            run_requests(llm.new_engine(), prompts[:_WARM_UP], max_tokens)
            runs.append(run_requests(llm.engine, prompts, max_tokens))
            labels.append(run_label(llm))
            tokens = sum(map(len, prompts))
    question = _QUESTIONS[versus.option]
    return Report(
        {"option": versus.option, **judging_object(labels[0], versus.names, runs, tokens)},
        lambda console: print_judging(console, question, labels[0], versus.names, runs, tokens),
        0 if identical(runs) else 1,
    )


def _load_side(side: Mapping[str, Any]) -> "LLM":
    loading = options.model_options(**{option: side[option] for option in _LOADING}, max_num_seqs=side["batch"])
    llm = load_model(side["model"], **loading, **_config(side))
    llm.engine.report_probabilities = False  # they are not shown
    return llm


def _config(side: Mapping[str, Any]) -> dict[str, bool]:
    """What `--class` and `--planning` mean for a scheduler."""
    return {
        "oneshot": _chosen(LIVES, side["execution_class"], "--class"),
        "prefix_planning": _chosen(PLANNING, side["planning"], "--planning"),
    }


def _chosen(choices: Mapping[str, bool], value: str, option: str) -> bool:
    if value not in choices:
        raise UsageError(f"{option} is {' or '.join(choices)}, and not {value!r}")
    return choices[value]


def _encoded(llm: "LLM", texts: Sequence[str]) -> list[list[int]]:
    return [list(llm.tokenizer.encode(text)) for text in texts]
