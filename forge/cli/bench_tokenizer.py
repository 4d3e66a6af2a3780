"""`forge bench tokenizer`: the fast path beside Hugging Face tokenizers."""

from pathlib import Path
from typing import Annotated

import typer

from forge.cli import machine, options
from forge.cli.running import Found


def bench_tokenizer(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A bundled or pulled model, a GGUF file, a tokenizer.json, or a folder with one."
        ),
    ] = "tales",
    json: options.JsonOption = False,
) -> Found:
    """Encode, decode, streams, batches, threads and load time, over seventeen kinds of text, against tokenizers.

    Nothing is timed before all results are equal.

    [dim]forge bench tokenizer path/to/tokenizer.json[/dim]
    """
    from forge.bench.tokenizer import run, tokenizer_benchmark_object
    from forge.errors import UsageError
    from forge.model.catalog import is_hash_model, resolve_model
    from forge.views.bench import BenchProgress
    from forge.views.report import Report
    from forge.views.terminal import open_error_console
    from forge.views.tokenizer_bench import print_tokenizer_benchmark

    if is_hash_model(source):
        raise UsageError("the hash model reads bytes: there is no tokenizer to measure")
    path = Path(source).expanduser()
    if path.suffix != ".json":
        path = resolve_model(source)
    with BenchProgress(open_error_console()) as progress:
        result = run(path, progress, machine.cpu_model())
    report = Report(tokenizer_benchmark_object(result), lambda console: print_tokenizer_benchmark(console, result))
    return report.as_json() if json else report
