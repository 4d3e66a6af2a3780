"""The engine's own speed on the requests of a serving benchmark, in a process of its own."""

import multiprocessing
import time
from typing import Any

from forge.bench.serve import ServePlan


def engine_tokens_per_second(model: str, options: dict[str, Any], plan: ServePlan) -> float:
    """Output tokens per second of `LLM(model, **options)` with `plan.concurrency` requests under way at any time."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(False)
    process = context.Process(target=_measure, args=(sending, model, options, plan))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    finally:
        process.join()


def _measure(sending, model: str, options: dict[str, Any], plan: ServePlan) -> None:
    from forge.engine.llm import LLM
    from forge.engine.sampling_params import SamplingParams

    llm = LLM(model, **options)
    params = SamplingParams(max_tokens=plan.output_tokens, ignore_eos=True)
    prompts = plan.prompts()
    llm.generate([prompts[0][::-1]], params)
    engine, waiting, under_way, done = llm.engine, list(enumerate(prompts)), 0, 0
    began = time.perf_counter()
    while waiting or under_way:
        while waiting and under_way < plan.concurrency:
            index, prompt = waiting.pop()
            engine.add_request(str(index), prompt, params)
            under_way += 1
        record = engine.step()
        done += len(record.tokens)
        under_way -= len(record.finished)
    sending.send(done / (time.perf_counter() - began))
