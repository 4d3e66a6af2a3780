"""The options that several commands share, each described once, and their way into the library's own values.

Only types and help live here. What a value means, and whether it has a meaning, is the library's business: it raises a
`UsageError` that says so.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forge.cli import completion
from forge.cli.arguments import JSON_HELP, JsonOption, was_given  # noqa: F401
from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import StructuredOutput
from forge.engine_args import KV_KINDS, EngineArgs, memory_bytes
from forge.errors import UsageError
from forge.option import option

_MODEL, _SAMPLING, _OUTPUT, _SPECULATION = "Model", "Sampling", "Output", "Speculation"
_SCHEDULER, _WORKLOAD = "Scheduler", "Requests"

DEFAULT_PROMPT = "Once upon a time"
DEFAULT_MAX_TOKENS = 32
DEFAULT_PACE = 20.0
SHOWABLE = ("blocks",)

PromptArgument = Annotated[
    str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input.", show_default=False)
]
DefaultedPrompt = Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")]
MaxTokens = Annotated[int, typer.Argument(metavar="MAX_TOKENS", help="Output tokens at most.")]

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A bundled or pulled model's name, a GGUF file, a Hugging Face folder, or hash.",
        autocompletion=completion.models,
        rich_help_panel=_MODEL,
    ),
]
_KV_HELP = f"KV cache: {'; '.join(f'{kind}, {what}' for kind, what in KV_KINDS.items())}."


def _stripped(value: str | None) -> str | None:
    return value if value is None else value.strip()


KvOption = Annotated[
    str,
    typer.Option("--kv", help=_KV_HELP, autocompletion=completion.kv_modes, callback=_stripped, rich_help_panel=_MODEL),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, reference or cuda.",
        show_default="the fastest on the CPU",
        autocompletion=completion.devices,
        rich_help_panel=_MODEL,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", help="CPU threads.", show_default="all usable CPUs", rich_help_panel=_MODEL),
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Prompt and output tokens at most; bounds the memory reserved.",
        show_default="the model's context, up to 4,096",
        rich_help_panel=_MODEL,
    ),
]
NumBlocksOption = Annotated[
    int | None,
    typer.Option(
        "--num-blocks",
        help="Blocks in the KV cache's pool.",
        show_default="512 for paged and prefix, or what one sequence may take",
        rich_help_panel=_MODEL,
    ),
]
PaceOption = Annotated[
    float,
    typer.Option("--pace", help="Steps per second that a terminal shows; 0 does not wait.", rich_help_panel=_OUTPUT),
]


InvariantOption = Annotated[
    bool,
    typer.Option(
        "--invariant",
        help="One tiling for every batch, so that bits never depend on it (cuda; elsewhere they never do).",
        rich_help_panel=_MODEL,
    ),
]

SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        help="Guess tokens ahead and verify them together: draft, a small model; ngram, what followed before; grammar, "
        "what a grammar leaves no choice about; off.",
        show_default="off",
        autocompletion=completion.proposers,
        rich_help_panel=_SPECULATION,
    ),
]
DraftOption = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help="The draft model; may be repeated, then all of them guess.",
        show_default="tales-draft",
        autocompletion=completion.models,
        rich_help_panel=_SPECULATION,
    ),
]
KOption = Annotated[
    int | None,
    typer.Option("--k", help="Tokens to guess at a time, at most; 4 if not given.", rich_help_panel=_SPECULATION),
]
SpeculateFixedOption = Annotated[
    bool,
    typer.Option(
        "--speculate-fixed", help="Always guess that many, also where it loses.", rich_help_panel=_SPECULATION
    ),
]
AcceptanceOption = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="Which draft tokens stand when tokens are sampled: gumbel (default; the output is the same as without a "
        "draft) or rejection (more are accepted; reproducible only with a fixed K).",
        autocompletion=completion.one_of("gumbel", "rejection"),
        rich_help_panel=_SPECULATION,
    ),
]

TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="0 is greedy: always the most probable token.", rich_help_panel=_SAMPLING)
]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="Keep the most probable tokens up to this sum.", rich_help_panel=_SAMPLING)
]
TopKOption = Annotated[
    int, typer.Option("--top-k", help="Keep this many of the most probable; 0 keeps all.", rich_help_panel=_SAMPLING)
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Same seed, same tokens.", show_default="drawn, and shown", rich_help_panel=_SAMPLING),
]

_FORM = "Structured output (one of these)"

MaxNumSeqsOption = Annotated[
    int | None,
    typer.Option("--max-num-seqs", help="Sequences that may run at once; 16 if not given.", rich_help_panel=_SCHEDULER),
]

PrefillOnlyTokensOption = Annotated[
    int | None,
    typer.Option(
        "--prefill-only-tokens",
        help="Tokens of prefill-only requests in one step; 2,048 if not given, 8,192 on a large GPU.",
        rich_help_panel=_SCHEDULER,
    ),
]
PrefillOnlyMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--prefill-only-memory",
        help="Temporary memory that a step may take for them; what the caches bear if not given.",
        rich_help_panel=_SCHEDULER,
    ),
]
TextsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT...", help="One text or several; - reads standard input.")
]
FileOption = Annotated[
    str | None, typer.Option("--file", "-f", help="More texts, one to a line.", rich_help_panel="Texts")
]

PromptTokensOption = Annotated[
    str,
    typer.Option("--prompt-tokens", help="Tokens of each prompt: 16, or 16:256.", rich_help_panel=_WORKLOAD),
]
OutputTokensOption = Annotated[
    str,
    typer.Option("--max-tokens", help="Tokens of each output: 64, or 8:64.", rich_help_panel=_WORKLOAD),
]
WorkloadSeedOption = Annotated[
    int, typer.Option("--seed", help="The same seed makes the same requests.", rich_help_panel=_WORKLOAD)
]

TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace", help="Record every step in this file, for forge replay.", dir_okay=False, rich_help_panel=_OUTPUT
    ),
]
StepOption = Annotated[
    bool, typer.Option("--step", help="Stop after each step and wait for a key.", rich_help_panel=_OUTPUT)
]
SvgOption = Annotated[
    Path | None, typer.Option("--svg", help="Save the final picture in this file.", rich_help_panel=_OUTPUT)
]


@dataclass(frozen=True)
class OutputArgs:
    """What a command shows of its run, and where it records it. Raises `UsageError` for what it cannot show."""

    show: str | None = option(None, "blocks: where every token's key and value lies.", _OUTPUT)
    pace: float = option(DEFAULT_PACE, "Steps per second that a terminal shows; 0 does not wait.", _OUTPUT)
    trace: Path | None = option(None, "Record every step in this file, for forge replay.", _OUTPUT)
    step: bool = option(False, "Stop after each step and wait for a key.", _OUTPUT)
    svg: Path | None = option(None, "Save the final picture in this file.", _OUTPUT)
    lines: bool = option(True, "In a pipe, a line for each step.", _OUTPUT)
    json: bool = option(False, JSON_HELP)

    def __post_init__(self) -> None:
        if self.show not in (None, *SHOWABLE):
            raise UsageError(f"--show takes {' or '.join(SHOWABLE)}, and {self.show!r} is something else")
        checked_pace(self.pace)

    def shows_blocks(self, engine: EngineArgs) -> bool:
        """Whether `--show blocks` was given. Raises `UsageError` with no cache."""
        return shows_blocks(self.show, str(engine.cache))


@dataclass(frozen=True)
class FormArgs:
    """The form that an output must have."""

    json_schema: str | None = option(None, "The output is JSON that this file's schema allows.", _FORM, metavar="FILE")
    regex: str | None = option(None, "The output matches this expression.", _FORM)
    choice: Sequence[str] = option((), "The output is one of these; to be repeated.", _FORM)
    grammar: str | None = option(None, "The output follows this file's Lark grammar.", _FORM, metavar="FILE")

    def structured_output(self) -> "StructuredOutput | None":
        """The form with the files read; None for no form. Raises `UsageError` for more than one."""
        given = [self.json_schema, self.regex, self.choice or None, self.grammar]
        if given.count(None) == len(given):
            return None
        if given.count(None) < len(given) - 1:
            raise UsageError("an output has one form: give one of --json-schema, --regex, --choice and --grammar")
        return StructuredOutput(
            json=self.json_schema and read_text(self.json_schema),
            regex=self.regex,
            choice=self.choice or None,
            grammar=self.grammar and read_text(self.grammar),
        )


def model_options(**given: Any) -> dict[str, Any]:
    """The keyword arguments of `LLM` that were given; what was not given is the library's to decide."""
    found = {name: value for name, value in given.items() if value is not None}
    for name in ("kv_memory", "prefill_only_memory"):
        if name in found:
            found[name] = memory_bytes(found[name], f"--{name.replace('_', '-')}")
    return found


def check_speculation(
    speculate: str | None, draft: list[str] | None, k: int | None, acceptance: str | None = None
) -> None:
    """Raises `UsageError` for options of speculation without `--speculate`."""
    given = [name for name, value in (("--draft", draft), ("--k", k), ("--acceptance", acceptance)) if value]
    if given and speculate is None:
        how = "--speculate draft" if draft else "--speculate draft or ngram"
        raise UsageError(f"{given[0]} means nothing without guesses: give {how} too, or leave it out")


def shows_blocks(show: str | None, kv: str) -> bool:
    """Whether `--show blocks` was given. Raises `UsageError` for anything else, or with no cache."""
    if show is None:
        return False
    if show not in SHOWABLE:
        raise UsageError(f"--show takes {' or '.join(SHOWABLE)}, and {show!r} is something else")
    if kv == "off":
        raise UsageError("--show blocks has nothing to show with --kv off: give --kv paged, prefix or basic")
    return True


def checked_pace(pace: float) -> float:
    """`--pace`. Raises `UsageError` for a negative one."""
    if not 0 <= pace < float("inf"):
        raise UsageError(f"--pace is a number of steps per second, or 0 not to wait, and {pace} is neither")
    return pace


def sampling_params(**given: Any) -> SamplingParams:
    """`SamplingParams` from option values. Raises `UsageError` for one that has no meaning."""
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def read_prompt(argument: str) -> str:
    """The prompt that `argument` means: itself, or what standard input holds where it is `-`.

    Raises `UsageError` if that is not text.
    """
    if argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: byte {error.start} does not belong there") from None


def read_prompts(path: str) -> list[str]:
    """The prompts of a file, one to a line; empty lines are none. Raises `UsageError` for one without any."""
    prompts = [line for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise UsageError(f"{path} has no prompt in it: write one to a line")
    return prompts


def read_texts(arguments: Sequence[str] | None, path: str | None) -> list[str]:
    """The texts that were given, then those of a file. Raises `UsageError` where there is none."""
    texts = [read_prompt(argument) for argument in arguments or ()]
    if path is not None:
        texts += read_prompts(path)
    if not texts:
        raise UsageError("there is no text: give one or more, or a file of them with --file")
    if not all(text.strip() for text in texts):
        raise UsageError("a text is empty: give it at least one word")
    return texts


def read_text(path: str) -> str:
    """What is in a file. Raises `UsageError` if that cannot be read, or is not text."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} does not belong there") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def model_label(model: str) -> str:
    """A short name of what is being loaded, before anything of it is known."""
    from forge.model.catalog import model_name

    return model_name(Path(model)) or model


def shown_path(path: Path) -> str:
    """`path` from the current folder if it lies in it, otherwise as it is."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
