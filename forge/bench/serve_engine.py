"""The engine's own speed on the requests of a serving benchmark, in a process of its own, between the server's turns.

Server and engine take turns on parts of the same requests, so that a machine that is slow for a while is slow for both.
"""

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

from forge.bench.serve import Prompt, ServePlan


class EngineTurns:
    """A loaded engine that waits for its turns. Used as a context manager."""

    def __init__(self, model: str, options: dict[str, Any], plan: ServePlan):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, model, options, plan))
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def __enter__(self) -> "EngineTurns":
        return self

    def __exit__(self, *exception) -> None:
        self._pipe.close()
        self._process.join()

    def turn(self, prompts: Sequence[Prompt]) -> float:
        """Output tokens per second with `plan.concurrency` requests under way at any time."""
        self._pipe.send(prompts)
        return self._pipe.recv()


def _work(pipe, model: str, options: dict[str, Any], plan: ServePlan) -> None:
    from forge.engine.sampling_params import SamplingParams
    from forge.llm import LLM

    llm = LLM(model, **options)
    params = SamplingParams(max_tokens=plan.output_tokens, ignore_eos=True)
    llm.generate([plan.prompts()[0][::-1]], params)
    pipe.send(None)
    try:
        while True:
            prompts = [llm.tokenizer.encode(one) if isinstance(one, str) else one for one in pipe.recv()]
            pipe.send(_turn(llm.engine, prompts, params, plan.concurrency))
    except EOFError:
        pass


def _turn(engine, prompts: list[list[int]], params, concurrency: int) -> float:
    waiting, tokens = dict(enumerate(prompts)), 0
    under_way: dict[int, str] = {}
    began = time.perf_counter()
    while waiting or under_way:
        while waiting and len(under_way) < concurrency:
            index, prompt = waiting.popitem()
            request_id = str(index)
            (seq_id,) = engine.add_request(request_id, prompt, params)
            under_way[seq_id] = request_id
        record = engine.step()
        tokens += len(record.tokens)
        for finish in record.finished:
            engine.forget(under_way.pop(finish.seq_id))
    return tokens / (time.perf_counter() - began)
