"""The options that several commands share, each described once, and their way into the library's own values.

Only types and help live here. What a value means, and whether it has a meaning, is the library's business: it raises a
`UsageError` that says so.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.arguments import JSON_HELP, JsonOption, Takes, was_given  # noqa: F401
from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.option import option

if TYPE_CHECKING:
    from forge.workload.requests import Arrival, Encoder, Range, Workload

OUTPUT, WORKLOAD, _FORM = "Output", "Requests", "Structured output (one of these)"

DEFAULT_PROMPT = "Once upon a time"
DEFAULT_MAX_TOKENS = 32
DEFAULT_PACE = 20.0
SHOWABLE = ("blocks",)

PromptArgument = Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")]
DefaultedPrompt = Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")]
MaxTokens = Annotated[int, typer.Argument(metavar="MAX_TOKENS", help="Output tokens at most.")]


@dataclass(frozen=True)
class RequestArgs:
    """Many requests that are made up, or those of a recorded run. Raises `UsageError` for what cannot be made."""

    requests: int = option(64, "How many requests.", WORKLOAD, flags="--requests -n", shown="one prompt")
    arrival: str = option(
        "all",
        "all at once, poisson:20 (a second, by the clock on the wall), or every:3 (one in 3 steps).",
        WORKLOAD,
    )
    prompt_tokens: str = option("16", "Tokens of each prompt: 16, or 16:256.", WORKLOAD)
    max_tokens: str = option("64", "Tokens of each output: 64, or 8:64.", WORKLOAD)
    seed: int = option(0, "The same seed makes the same requests.", WORKLOAD)
    workload: Path | None = option(
        None, "Replay the arrivals and lengths of a run that --trace recorded.", WORKLOAD, metavar="FILE"
    )

    def __post_init__(self) -> None:
        from forge.workload.requests import recorded_requests

        self._shape()
        if self.workload is not None:
            recorded_requests(self.workload)  # a wrong file is refused before a model is loaded

    def made(self, tokenizer: "Encoder", priorities: bool = False) -> "Workload":
        """Return the requests. priorities: each that is made up draws one."""
        from forge.workload.requests import make_workload, recorded_workload

        if self.workload is not None:
            return recorded_workload(self.workload, tokenizer, self.seed)
        return make_workload(tokenizer, self.requests, *self._shape(), priorities=priorities, seed=self.seed)

    def _shape(self) -> "tuple[Range, Range, Arrival]":
        """Parse the lengths of prompts and outputs, and how the requests arrive."""
        from forge.workload.requests import Arrival, Range

        lengths = ((self.prompt_tokens, "--prompt-tokens"), (self.max_tokens, "--max-tokens"))
        prompts, outputs = (Range.parse(*length) for length in lengths)
        return prompts, outputs, Arrival.parse(self.arrival)


@dataclass(frozen=True)
class OutputArgs:
    """The options that say what a command shows of its run, and where it records it. Raises `UsageError` for what it
    cannot show."""

    show: str | None = option(None, "blocks: where every token's key and value lies.", OUTPUT)
    pace: float = option(DEFAULT_PACE, "Steps per second that a terminal shows; 0 does not wait.", OUTPUT)
    trace: Path | None = option(None, "Record every step in this file, for forge replay.", OUTPUT)
    step: bool = option(False, "Stop after each step and wait for a key.", OUTPUT)
    svg: Path | None = option(None, "Save the final picture in this file.", OUTPUT)
    lines: bool = option(True, "In a pipe, a line for each step.", OUTPUT)
    json: bool = option(False, JSON_HELP)

    def __post_init__(self) -> None:
        if self.show not in (None, *SHOWABLE):
            raise UsageError(f"--show takes {' or '.join(SHOWABLE)}, and {self.show!r} is something else")
        if not 0 <= self.pace < float("inf"):
            raise UsageError(f"--pace is a number of steps per second, or 0 not to wait, and {self.pace} is neither")


@dataclass(frozen=True)
class FormArgs:
    """The form that an output must have."""

    json_schema: str | None = option(None, "The output is JSON that this file's schema allows.", _FORM, metavar="FILE")
    regex: str | None = option(None, "The output matches this expression.", _FORM)
    choice: Sequence[str] = option((), "The output is one of these; to be repeated.", _FORM)
    grammar: str | None = option(None, "The output follows this file's Lark grammar.", _FORM, metavar="FILE")

    def structured_output(self) -> "StructuredOutput | None":
        """Read the files and return the form; None for no form. Raises `UsageError` for more than one."""
        forms = [self.json_schema, self.regex, self.choice or None, self.grammar]
        if forms.count(None) == len(forms):
            return None
        if forms.count(None) < len(forms) - 1:
            raise UsageError("an output has one form: give one of --json-schema, --regex, --choice and --grammar")
        return StructuredOutput(
            json=self.json_schema and read_text(self.json_schema),
            regex=self.regex,
            choice=self.choice or None,
            grammar=self.grammar and read_text(self.grammar),
        )


def read_prompt(argument: str) -> str:
    """Return the prompt that `argument` means: itself, or the text of standard input for `-`.

    Raises `UsageError` if that is not text.
    """
    if argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: byte {error.start} does not belong there") from None


def read_prompts(path: str) -> list[str]:
    """Return the prompts of a file, one to a line; empty lines are none. Raises `UsageError` for one without any."""
    prompts = [line for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise UsageError(f"{path} has no prompt in it: write one to a line")
    return prompts


def read_texts(arguments: Sequence[str] | None, path: str | None) -> list[str]:
    """Return the texts that were given, then those of a file. Raises `UsageError` if there is none."""
    texts = [read_prompt(argument) for argument in arguments or ()]
    if path is not None:
        texts += read_prompts(path)
    if not texts:
        raise UsageError("there is no text: give one or more, or a file of them with --file")
    if not all(text.strip() for text in texts):
        raise UsageError("a text is empty: give it at least one word")
    return texts


def read_text(path: str) -> str:
    """Read a text file. Raises `UsageError` if it cannot be read, or is not text."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} does not belong there") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def parse_numbers(text: str, flag: str, example: str, what: str = "numbers", least: int = 1) -> list[int]:
    """Parse `1,4,16`, whole numbers from `least` on. Raises `UsageError` for anything else."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= least for part in parts):
        raise UsageError(f"{flag} takes {what} from {least} with commas, such as {example}, and not {text!r}")
    return [int(part) for part in parts]


def shown_path(path: Path) -> str:
    """`path` from the current folder if it lies in it, otherwise as it is."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
