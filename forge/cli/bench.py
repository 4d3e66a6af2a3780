"""`forge bench`: how fast forge is beside its peers on this machine, and what the cheaper ways of computing cost."""

from dataclasses import replace
from typing import Annotated

import typer

from forge.cli import machine, options
from forge.cli.bench_cuda import bench_cuda
from forge.cli.bench_oneshot import bench_oneshot, bench_planning
from forge.cli.bench_tokenizer import bench_tokenizer
from forge.cli.running import INTERRUPTED, Found

_MEASURE, _OUTPUT = "Measurement", "Output"

bench = typer.Typer(
    help="Measure speed beside llama.cpp and transformers, the caches, the engine, guessing ahead, or the accuracy "
    "of quantization.",
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

    Each engine takes turns in a process of its own. A peer that is not installed is left out, and said to be.

    [dim]forge bench cpu -m Qwen3-0.6B-Q8_0.gguf --peer-python ~/llama/bin/python[/dim]
    """
    from forge.bench.cases import select_cases
    from forge.bench.cpu import Effort, Plan, run, select_peers
    from forge.bench.results import CpuBenchmark, benchmark_object
    from forge.views.bench import BenchProgress, print_cpu_benchmark
    from forge.views.json_output import to_json
    from forge.views.terminal import open_console, open_error_console

    effort = Effort.quick() if quick else Effort()
    if reps is not None:
        effort = replace(effort, repetitions=reps)
    plan = Plan(model, select_cases(only), select_peers(peer or "all"), threads, peer_python, effort)
    result: CpuBenchmark | None = None
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
    assert result is not None, "a benchmark has at least a beginning"
    if json:
        open_console().print(to_json(benchmark_object(result)), soft_wrap=True)
    else:
        print_cpu_benchmark(open_console(), result)
    raise typer.Exit(INTERRUPTED if result.interrupted else 0)


@bench.command("cache")
def bench_cache(
    model: options.ModelOption = "tales",
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length", help="Tokens in the cache; may be repeated.", show_default="128, 1024", rich_help_panel=_MEASURE
        ),
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(
            "--block-size",
            help="Tokens per block; may be repeated.",
            show_default="1, 16, 64",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    reps: Annotated[
        int | None,
        typer.Option("--reps", help="Steps of each cache per figure; 60 if not given.", rich_help_panel=_MEASURE),
    ] = None,
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few and short turns: to see it run.", rich_help_panel=_MEASURE)
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """The paged cache beside the contiguous one: time per step, what is reserved and empty, what a prefix saves.

    [dim]forge bench cache -m Qwen3-0.6B-Q8_0.gguf --length 1024 --block-size 16[/dim]
    """
    from forge.bench.cache import BLOCK_SIZES, LENGTHS, Effort, cache_benchmark_object, run
    from forge.views.bench import BenchProgress
    from forge.views.cache_bench import print_cache_benchmark
    from forge.views.json_output import to_json
    from forge.views.terminal import open_console, open_error_console

    effort = Effort.quick() if quick else Effort()
    if reps is not None:
        effort = replace(effort, steps=reps)
    with BenchProgress(open_error_console()) as progress:
        result = run(
            model,
            length or LENGTHS,
            block_size or BLOCK_SIZES,
            device,
            threads,
            effort,
            progress,
            machine.cpu_model(),
        )
    if json:
        open_console().print(to_json(cache_benchmark_object(result)), soft_wrap=True)
    else:
        print_cache_benchmark(open_console(), result)


bench.command("cuda")(bench_cuda)
bench.command("oneshot")(bench_oneshot)
bench.command("prefix-planning")(bench_planning)
bench.command("tokenizer")(bench_tokenizer)


@bench.command("engine")
def bench_engine(
    model: options.ModelOption = "tales",
    requests: Annotated[int, typer.Option("--requests", "-n", help="How many requests.")] = 64,
    prompt_tokens: options.PromptTokensOption = "16",
    max_tokens: options.OutputTokensOption = "64",
    seed: options.WorkloadSeedOption = 0,
    batch: Annotated[str, typer.Option("--batch", help="Sequences at once, with commas.")] = "4,16",
    kv: options.KvOption = "paged",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    num_blocks: options.NumBlocksOption = None,
    speculate: options.SpeculateOption = None,
    draft: options.DraftOption = None,
    k: options.KOption = None,
    reps: Annotated[int, typer.Option("--reps", help="Turns of each way; the median counts.")] = 3,
    json: options.JsonOption = False,
) -> Found:
    """Requests one after another, in static batches and continuously: tokens/s, ms per request, latency.

    sequential makes a fresh engine for each request; loading the weights is not counted. With --draft or --speculate
    each size also runs with K guesses in every cycle.

    [dim]forge bench engine --requests 64 --prompt-tokens 16 --max-tokens 64[/dim]

    [dim]forge bench engine -m hash --draft hash:0.8[/dim]
    """
    from forge.bench.engine import How
    from forge.errors import UsageError
    from forge.experiments.batching import measure_ways

    sizes = [int(size) if size.strip().isdecimal() else 0 for size in batch.split(",")]
    if min(sizes) < 1 or reps < 1:
        raise UsageError("--batch takes numbers of sequences with commas, such as 4,16, and --reps at least 1")
    speculate = speculate or ("draft" if draft else None)
    options.check_speculation(speculate, draft, k)
    speculation = {"speculate": speculate, "draft": draft, "k": k, "speculate_fixed": speculate is not None}
    loading = options.model_options(kv=kv, device=device, threads=threads, num_blocks=num_blocks, **speculation)
    ways: list[tuple[How, int]] = [("sequential", 1)]
    for size in sizes:
        ways += [("static", size), ("continuous", size)]
        ways += [("speculative", size)] if speculate not in (None, "off") else []
    report = measure_ways(model, loading, (requests, prompt_tokens, max_tokens, seed), ways, reps)
    return report.as_json() if json else report


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


@bench.command("host")
def bench_host(
    kv: options.KvOption = "paged",
    steps: Annotated[int, typer.Option("--steps", help="Steps per figure.", min=2)] = 200,
    json: options.JsonOption = False,
) -> Found:
    """What a step costs beside its forward pass: planning, sampling, records; with 1, 4, 16 and 64 sequences."""
    from forge.bench.host_time import measure
    from forge.views.host_time import host_time_object, print_host_time
    from forge.views.report import Report

    times, where = measure(kv, steps=steps), machine.cpu_model()
    report = Report({"steps": host_time_object(times)}, lambda console: print_host_time(console, times, where))
    return report.as_json() if json else report


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


@bench.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option("--url", help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8080",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="As the server calls it.", show_default="its first")
    ] = None,
    dataset: Annotated[
        str, typer.Option("--dataset", help="random token ids, or words.", rich_help_panel=_MEASURE)
    ] = "random",
    input_tokens: Annotated[int, typer.Option("--input-tokens", rich_help_panel=_MEASURE)] = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", rich_help_panel=_MEASURE)] = 32,
    num_prompts: Annotated[int, typer.Option("--num-prompts", rich_help_panel=_MEASURE)] = 400,
    concurrency: Annotated[
        int, typer.Option("--concurrency", help="Requests under way at most.", rich_help_panel=_MEASURE)
    ] = 4,
    request_rate: Annotated[
        float | None,
        typer.Option(
            "--request-rate", help="Requests per second.", show_default="as answered", rich_help_panel=_MEASURE
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option("--goodput", help="A goal, such as ttft:100; may be repeated.", rich_help_panel=_MEASURE),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", rich_help_panel=_MEASURE)] = 0,
    probe_health: Annotated[
        bool, typer.Option("--probe-health", help="Time /health meanwhile.", rich_help_panel=_MEASURE)
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", help="Run the same on this model without a server, in turns.", rich_help_panel=_MEASURE
        ),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option("--num-blocks", help="For --engine.", rich_help_panel=_MEASURE)
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option("--peer", help="Send the same to another server, in turns.", rich_help_panel=_MEASURE),
    ] = None,
    peer_model: Annotated[
        str | None, typer.Option("--peer-model", help="As the peer calls it.", show_default="its first")
    ] = None,
    turns: Annotated[int, typer.Option("--turns", help="Of --engine or --peer.", rich_help_panel=_MEASURE)] = 7,
    threads: options.ThreadsOption = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="FORGE_API_KEY")] = None,
    json: options.JsonOption = False,
) -> int:
    """What clients of a server see: TTFT, TPOT, ITL, end-to-end latency, throughput.

    [dim]forge bench serve --concurrency 64 --num-prompts 400[/dim]
    [dim]forge bench serve --concurrency 16 --num-prompts 112 --peer http://127.0.0.1:8081[/dim]
    """
    import shlex
    import sys

    from forge.bench.serve import ServePlan, parse_goodput, run, serve_object
    from forge.bench.serve_engine import EngineTurns
    from forge.errors import UsageError
    from forge.views.bench import BenchProgress
    from forge.views.json_output import to_json
    from forge.views.serve_bench import print_serve_benchmark
    from forge.views.terminal import open_console, open_error_console

    plan = ServePlan(
        url,
        model,
        dataset,
        input_tokens,
        output_tokens,
        num_prompts,
        concurrency,
        request_rate,
        seed,
        goodput=parse_goodput(goodput or ()),
        api_key=api_key,
        probe_health=probe_health,
        turns=turns,
    )
    if peer is not None and engine is not None:
        raise UsageError("--peer and --engine are two comparisons: give one of them")
    other = replace(plan, url=peer, model=peer_model, api_key=None, probe_health=False) if peer is not None else None
    with BenchProgress(open_error_console()) as progress:
        if engine is None:
            result = run(plan, progress, peer=other)
        else:
            loading = options.model_options(num_blocks=num_blocks, threads=threads)
            with EngineTurns(engine, loading | {"kv": "prefix", "max_num_seqs": 64}, plan) as own:
                result = run(plan, progress, engine_turn=own.turn)
        result = replace(result, command=shlex.join(["forge", *sys.argv[1:]]))
    if json:
        open_console().print(to_json(serve_object(result)), soft_wrap=True)
    else:
        print_serve_benchmark(open_console(), result)
    return 0 if result.good else 1
