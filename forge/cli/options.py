"""The options that several commands share, each described once, and their way into the library's own values.

Only types and help live here. What a value means, and whether it has a meaning, is the library's business: it raises a
`UsageError` that says so.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from forge.engine.sampling_params import SamplingParams

_MODEL, _SAMPLING, _OUTPUT, _SPECULATION = "Model", "Sampling", "Output", "Speculation"

DEFAULT_PROMPT = "Once upon a time"
DEFAULT_MAX_TOKENS = 32

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
        help="A bundled or pulled model's name, a GGUF file, or a Hugging Face folder.",
        rich_help_panel=_MODEL,
    ),
]
KvOption = Annotated[
    str, typer.Option("--kv", help="KV cache: off, or basic (on means basic).", rich_help_panel=_MODEL)
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="cpu, reference or cuda.", show_default="the fastest on the CPU", rich_help_panel=_MODEL
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
BlockSizeOption = Annotated[
    int | None,
    typer.Option("--block-size", help="Tokens per KV block; 16 if not given.", rich_help_panel=_MODEL),
]

KvDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        help="What keys and values are rounded to: float32, float16 or bfloat16.",
        show_default="the device's own",
        rich_help_panel=_MODEL,
    ),
]

QuantizeOption = Annotated[
    str | None,
    typer.Option("--quantize", help="Quantize float weights as they are loaded: q8_0.", rich_help_panel=_MODEL),
]

SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        help="Guess tokens ahead and verify them together: draft, a small model; ngram, what followed before; off.",
        show_default="off",
        rich_help_panel=_SPECULATION,
    ),
]
DraftOption = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help="The draft model; may be repeated, then all of them guess.",
        show_default="tales-draft",
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

TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="0 always takes the likeliest token.", rich_help_panel=_SAMPLING)
]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="Keep the likeliest tokens up to this sum.", rich_help_panel=_SAMPLING)
]
TopKOption = Annotated[
    int, typer.Option("--top-k", help="Keep this many of the likeliest; 0 keeps all.", rich_help_panel=_SAMPLING)
]
MinPOption = Annotated[
    float,
    typer.Option("--min-p", help="Keep tokens this times as likely as the likeliest.", rich_help_panel=_SAMPLING),
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1 repeats less.", rich_help_panel=_SAMPLING)
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Same seed, same tokens.", show_default="drawn, and shown", rich_help_panel=_SAMPLING),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End before this text; may be repeated.", rich_help_panel=_SAMPLING),
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Go on past the end-of-text token.", rich_help_panel=_SAMPLING),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUTPUT)]


def model_options(**given: Any) -> dict[str, Any]:
    """The keyword arguments of `LLM` that were given; what was not given is the library's to decide."""
    return {name: value for name, value in given.items() if value is not None}


def sampling_params(**given: Any) -> "SamplingParams":
    """`SamplingParams` from option values. Raises `UsageError` for one that has no meaning."""
    from forge.engine.sampling_params import SamplingParams

    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def read_prompt(argument: str) -> str:
    """The prompt that `argument` means: itself, or what standard input holds where it is `-`.

    Raises `UsageError` if that is not text.
    """
    if argument != "-":
        return argument
    import sys

    from forge.errors import UsageError

    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: byte {error.start} does not belong there") from None


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
