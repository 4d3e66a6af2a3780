"""The endpoints that want one answer of one forward pass: embeddings, rerank, score, classify.

What each makes of the engine's answers is `forge.engine.tasks`', as for `LLM`; here are bodies and shapes.
"""

import base64
import secrets
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

from forge.engine import tasks
from forge.server.engine_client import Prompt
from forge.server.errors import ApiError
from forge.server.exchange import current_exchange
from forge.server.requests import beside_the_loop
from forge.server.schema import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from forge.server.service import Service
from forge.server.streaming import leaving_client
from forge.server.strict_json import JsonAnswer, to_json

Values = TypeVar("Values")

MAX_TOKENS = 1 << 21
"""Tokens of one question's prompts at most, with what is scored behind them: they go to the engine's process in one
piece."""


async def _ask(service: Service, request: Request, question: tasks.Question[Values], param: str) -> Values:
    """Return the values of a question, whose requests all run, or none of them when the client leaves."""
    requests = [(list(token_ids), task) for token_ids, task in question.requests]
    longest = max((len(token_ids) for token_ids, _ in requests), default=0)
    if longest > service.ready.max_model_len:
        raise service.reader.too_long(f"{longest} tokens with what it follows", param)
    service.check_queue(len(requests))
    num_tokens = sum([len(token_ids) for token_ids, _ in requests])
    if num_tokens > MAX_TOKENS:
        raise ApiError(f"that asks for {num_tokens} tokens at once, and {MAX_TOKENS} go: send less in one request", 413)
    began = time.perf_counter()
    async with leaving_client(request):
        answers = await service.client.answer(requests)
    if (exchange := current_exchange()) is not None:
        exchange.num_prompt_tokens += num_tokens
    service.metrics.take_answers([len(token_ids) for token_ids, _ in requests], time.perf_counter() - began)
    return question.finish(answers)


async def _answer(
    prefix: str, body: Any, model: str, prompts: Sequence[Prompt], size: int = 0, **rows: Iterable[dict[str, Any]]
) -> JsonAnswer:
    """Write the parts that all these answers share, and the rows of this one. size: how many numbers and tokens they
    have; if there are many, the rows are made and written on another thread."""
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    head = {"id": f"{prefix}-{body.request_id or secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}

    def written() -> bytes:
        return to_json({**head, "model": model, **{name: list(rows[name]) for name in rows}, "usage": usage})

    return JsonAnswer(await beside_the_loop(size, written))


def add_scores(app: FastAPI, service: Service) -> None:
    accept, prompts_of, cut_of = service.reader.accept, service.reader.prompts, service.reader.cut_of

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Return a unit vector for each text, from the hidden states of all tokens or of the last, as the model's file
        says."""
        model = accept(body)
        prompts = await prompts_of(body.input, "input", bos=body.add_special_tokens, cut=cut_of(body))
        vectors = await _ask(service, request, tasks.embed(_ids(prompts), service.ready.pooling), "input")
        if body.dimensions is not None:
            vectors = _shortened(vectors, body.dimensions)
        in_base64 = body.encoding_format == "base64"
        shown = (_in_base64(vector) if in_base64 else vector.tolist() for vector in vectors)
        data = ({"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown))
        return await _answer("embd", body, model, prompts, vectors.size, data=data)

    @app.post("/v1/rerank")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Score how relevant each document is to the query; return the most relevant first."""
        model, tokenizer = accept(body), service.tokenizer
        service.reader.check_number(body.documents, "documents")
        words = tasks.rerank_candidates(tokenizer, service.ready.labels)
        prompts = []
        for document in body.documents:
            encode = partial(tasks.rerank_prompt, tokenizer, body.query, document)
            ids = await service.reader.encoded(len(body.query) + len(document), encode, "documents")
            prompts.append(await service.reader.one_prompt(ids, "documents"))
        scores = await _ask(service, request, tasks.rerank(_ids(prompts), *words), "documents")
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({} if body.return_documents is False else {"document": {"text": body.documents[index]}})
            for index in order
        ]
        return await _answer("rerank", body, model, prompts, results=results)

    @app.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Score how likely each `text_2` is to follow its `text_1`: the natural log probability of all its tokens."""
        model = accept(body)
        texts_1, texts_2 = _pairs(body)
        seconds, firsts = await prompts_of(texts_2, "text_2"), await prompts_of(texts_1, "text_1")
        pairs = list(zip(_ids(firsts), _ids(seconds), strict=True))
        scores = await _ask(service, request, tasks.score(pairs, 0), "text_2")
        data = (
            {
                "index": index,
                "object": "score",
                "score": score.total,
                "tokens": list(map(service.tokenizer.token_text, score.token_ids)),
                "token_logprobs": list(score.logprobs),
            }
            for index, score in enumerate(scores)
        )
        size = sum([len(score.token_ids) for score in scores])
        return await _answer("score", body, model, [*firsts, *seconds], size, data=data)

    @app.post("/classify")
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """Return how likely each label is to follow each input; without labels, those of the model's own head."""
        model, head_labels = accept(body), service.ready.labels
        if (body.labels is None) != bool(head_labels):
            which = (
                f"this model has labels of its own: {', '.join(head_labels)}" if head_labels else "labels are missing"
            )
            raise ApiError(which, param="labels")
        prompts = await prompts_of(body.input, "input", bos=body.add_special_tokens, cut=cut_of(body))
        names = body.labels or list(head_labels)
        encode = service.reader.encode
        labels = [await encode(label, "labels", bos=False) for label in body.labels or ()]
        if not all(labels):
            raise ApiError("a label must not be empty", param="labels")
        if any(len(label) > 1 for label in labels):
            service.check_queue(len(prompts) * len(labels))  # each label is scored behind each prompt

        if head_labels:
            question = tasks.classify_by_head(_ids(prompts), head_labels)
        else:
            question = tasks.classify(_ids(prompts), labels, names)
        classified = await _ask(service, request, question, "labels")
        data = [
            {
                "index": index,
                "label": answer.label,
                "probs": [answer.probabilities[label] for label in names],
                "num_classes": len(names),
            }
            for index, answer in enumerate(classified)
        ]
        return await _answer("classify", body, model, prompts, data=data)


def _in_base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _shortened(vectors: np.ndarray, dimensions: int) -> np.ndarray:
    """Return unit vectors of the first `dimensions` of each (Matryoshka embeddings: Kusupati et al. 2022)."""
    if dimensions > vectors.shape[1]:
        raise ApiError(f"this model's embeddings have {vectors.shape[1]} dimensions, ask for fewer", param="dimensions")
    first = vectors[:, :dimensions]
    lengths = np.maximum(np.linalg.norm(first, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    unit: np.ndarray = first / lengths
    return unit


def _ids(prompts: Sequence[Prompt]) -> list[list[int]]:
    return [prompt.token_ids for prompt in prompts]


def _pairs(body: ScoreRequest) -> tuple[list[str], list[str]]:
    """Return `text_1` and `text_2` as two lists of one length: a single text goes with every one of the other side."""
    firsts, seconds = ([texts] if isinstance(texts, str) else texts for texts in (body.text_1, body.text_2))
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise ApiError(f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}", param="text_2")
    return firsts, seconds
