"""`forge bench`: how fast forge is beside its peers on this machine, and what the cheaper ways of computing cost."""

from dataclasses import replace
from typing import Annotated

import typer

from forge.cli import machine, options
from forge.cli.running import INTERRUPTED

_MEASURE, _OUTPUT = "Measurement", "Output"

bench = typer.Typer(
    help="Measure speed beside llama.cpp and transformers, the accuracy of quantization, the gain of guessing ahead.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@bench.command("cpu")
def bench_cpu(
    model: options.ModelOption = "tales",
    threads: options.ThreadsOption = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            help="Figures to measure, with commas: decode1, decode1@1024, decode4, decode16, prefill128, prefill512.",
            show_default="all",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    reps: Annotated[
        int | None,
        typer.Option("--reps", help="Turns of each contender per figure; 9 if not given.", rich_help_panel=_MEASURE),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="llama.cpp, transformers, all or none; may be repeated.",
            show_default="all",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option(
            "--peer-python",
            help="A Python interpreter that has the peers, if this one has not.",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few and short turns: to see it run.", rich_help_panel=_MEASURE)
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Decode, prefill, load time and memory of the cpu device, beside its peers on the same file in the same run.

    Everybody takes turns in a process of its own. A peer that is not installed is left out, and said to be.

    [dim]forge bench cpu -m Qwen3-0.6B-Q8_0.gguf --peer-python ~/llama/bin/python[/dim]
    """
    from forge.bench.cases import select_cases
    from forge.bench.cpu import Effort, Plan, run, select_peers
    from forge.bench.results import benchmark_object
    from forge.views.bench import BenchProgress, print_cpu_benchmark
    from forge.views.json_output import to_json
    from forge.views.terminal import open_console, open_error_console

    effort = Effort.quick() if quick else Effort()
    if reps is not None:
        effort = replace(effort, repetitions=reps)
    plan = Plan(model, select_cases(only), select_peers(peer or "all"), threads, peer_python, effort)
    result = None
    with BenchProgress(open_error_console()) as progress:
        measuring = run(plan, progress, machine.cpu_model())
        try:
            for result in measuring:  # noqa: B007 (the last one is the whole)
                pass
        except KeyboardInterrupt:
            if result is None:
                raise
            result = replace(result, interrupted=True)
        finally:
            measuring.close()
    if json:
        open_console().print(to_json(benchmark_object(result)), soft_wrap=True)
    else:
        print_cpu_benchmark(open_console(), result)
    raise typer.Exit(INTERRUPTED if result.interrupted else 0)


@bench.command("quality")
def bench_quality(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A bundled model's name, or a GGUF file; may be repeated. The others are held against the first too.",
            show_default="tales-q8_0, tales-q4_0",
        ),
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option("--kv-dtype", help="float32, float16 or bfloat16; may be repeated.", show_default="all three"),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="cpu, reference or cuda; may be repeated.", show_default="cpu"),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="Held-out text, UTF-8.", show_default="held-out stories")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of the text to read at most.")] = 2048,
    threads: options.ThreadsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Perplexity and KL divergence against float32 on held-out text, by quantization and KV dtype."""
    from pathlib import Path

    from forge.bench.quality import DEFAULT_MODELS, quality_object, run
    from forge.cache.kv_storage import KV_DTYPES
    from forge.errors import UsageError
    from forge.views.bench import BenchProgress, print_quality
    from forge.views.json_output import to_json
    from forge.views.terminal import open_console, open_error_console

    for dtype in kv_dtype or ():
        if dtype not in KV_DTYPES:
            raise UsageError(f"unknown kv dtype {dtype!r}; supported: {', '.join(KV_DTYPES)}")
    with BenchProgress(open_error_console()) as progress:
        result = run(
            models or DEFAULT_MODELS,
            kv_dtypes=kv_dtype or KV_DTYPES,
            devices=device or ["cpu"],
            text=Path(text).expanduser() if text else None,
            tokens=tokens,
            threads=threads,
            on_progress=progress,
        )
    if json:
        open_console().print(to_json(quality_object(result)), soft_wrap=True)
    else:
        print_quality(open_console(), result)


@bench.command("speculation")
def bench_speculation(
    model: options.ModelOption = "tales",
    draft: options.DraftOption = None,
    kv: options.KvOption = "paged",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    speculate: Annotated[
        list[str] | None,
        typer.Option(
            "--speculate",
            help="draft or ngram; may be repeated.",
            show_default="both",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--k", help="Guesses at a time; may be repeated.", show_default="1 to 8", rich_help_panel=_MEASURE
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", help="Sequences; may be repeated.", show_default="1, 4, 16", rich_help_panel=_MEASURE),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Of each sequence; 128 if not given.", rich_help_panel=_MEASURE)
    ] = None,
    reps: Annotated[
        int | None, typer.Option("--reps", help="Rounds; 5 if not given.", rich_help_panel=_MEASURE)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few and short turns: to see it run.", rich_help_panel=_MEASURE)
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Acceptance, tokens per cycle and speed-up by the number of guesses, beside what the formula predicts.

    [dim]forge bench speculation --batch 1 --k 2 --k 4[/dim]
    """
    from forge.bench.speculation import BATCHES, GUESSES, Effort, Plan, benchmark_object, run
    from forge.cli.running import load_model, run_label
    from forge.speculation.setup import checked_mode
    from forge.views.bench import BenchProgress
    from forge.views.bench_speculation import print_speculation_benchmark
    from forge.views.json_output import to_json
    from forge.views.terminal import open_console, open_error_console

    for mode in speculate or ():
        checked_mode(mode, 1)
    for number in k or ():
        checked_mode("off", number)
    effort = Effort.quick() if quick else Effort()
    given = {"num_tokens": tokens, "repetitions": reps}
    effort = replace(effort, **{name: value for name, value in given.items() if value is not None})
    plan = Plan(tuple(speculate or ("draft", "ngram")), tuple(k or GUESSES), tuple(batch or BATCHES), effort)
    llm = load_model(model, **options.model_options(kv=kv, device=device, threads=threads))
    llm.engine.report_probabilities = False
    figures, interrupted = [], False
    with BenchProgress(open_error_console()) as progress:
        try:
            for figure in run(llm, plan, draft or (), progress):
                figures.append(figure)
        except KeyboardInterrupt:
            if not figures:
                raise
            interrupted = True
    label = f"{run_label(llm)} · {machine.cpu_model()}"
    if json:
        facts = {"label": label, "tokens": effort.num_tokens, "repetitions": effort.repetitions}
        open_console().print(to_json(benchmark_object(figures, facts)), soft_wrap=True)
    else:
        print_speculation_benchmark(open_console(), figures, label)
    raise typer.Exit(INTERRUPTED if interrupted else 0)
