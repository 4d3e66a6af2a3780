"""`forge cuda`: the GPU chapter's experiment. What does a forward wait for there, and what are graphs worth?"""

import typer

from forge.cli import options
from forge.cli.running import drive, exit_status, load_model

LIMIT_BYTES, LIMIT_SECONDS = 1 << 30, 0.3
"""How much of the GPU's limits is measured here: enough for a picture. `forge bench cuda` measures them well."""


def cuda(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    model: options.ModelOption = "tales",
    threads: options.ThreadsOption = None,
    json: options.JsonOption = False,
) -> None:
    """The same prompt on cpu and cuda, with graphs and without. What does a forward wait for?"""
    from forge.backends.devices import why_not_cuda
    from forge.errors import UsageError

    reason = why_not_cuda()
    if reason is not None:
        raise UsageError(reason.replace("--device cuda", "forge cuda").replace(": use --device cpu", ""))
    from forge.bench.cuda_limits_worker import measure
    from forge.views.cuda import DeviceRun, Roof, Work, cuda_object, print_cuda
    from forge.views.json_output import to_json
    from forge.views.terminal import open_console

    text = options.read_prompt(prompt)
    params = options.sampling_params(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    on_cpu = load_model(model, kv="basic", device="cpu", **options.model_options(threads=threads))
    runs = [DeviceRun("cpu", "c", *_warm_run(on_cpu, text, params))]
    on_gpu = load_model(model, kv="basic", device="cuda")
    for name, mark, graphs in (("cuda, kernel by kernel", "k", False), ("cuda, graphs", "g", True)):
        on_gpu.model.backend.uses_graphs = graphs
        runs.append(DeviceRun(name, mark, *_warm_run(on_gpu, text, params)))
    limits = measure(LIMIT_BYTES, LIMIT_SECONDS)
    matrices = on_gpu.model.backend.matrices
    work = Work(sum(m.read_bytes for m in matrices), sum(m.rows * m.columns for m in matrices))
    roof = Roof(limits["device"], limits["read_bytes_per_second"], 2 * limits["products_per_second"])
    if json:
        open_console().print(to_json(cuda_object(runs, work, roof)), soft_wrap=True)
    else:
        print_cuda(open_console(), runs, work, roof)
    raise typer.Exit(exit_status(*(run.result for run in runs)))


def _warm_run(llm, text: str, params):
    """The run, and how each of its forwards was launched, once everything is compiled and captured."""
    result, modes = None, []
    for _ in range(3):
        modes = []

        def note(record, modes=modes) -> None:
            execution = getattr(llm.model.backend, "execution", None)
            if execution is not None:
                modes.append(execution.mode)

        run = llm.start([text], params)
        result = drive(llm, run, params, note)
        if result.interrupted:
            break
    return result, tuple(modes)
