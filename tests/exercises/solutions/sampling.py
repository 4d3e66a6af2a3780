import numpy as np


def greedy(logits):
    return int(np.argmax(logits))


def filtered(logits, params):
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    scores = logits[order].astype(np.float64)
    scores -= scores.max()
    scores /= params.temperature
    if params.top_p < 1:
        probabilities = np.exp(scores) / np.exp(scores).sum()
        before = np.cumsum(probabilities) - probabilities
        kept = before < params.top_p
        order, scores = order[kept], scores[kept]
    if params.min_p:
        kept = np.exp(scores) >= params.min_p
        order, scores = order[kept], scores[kept]
    ascending = np.argsort(order)
    return order[ascending], scores[ascending]


def draw(token_ids, scores, uniform):
    noise = -np.log(-np.log(uniform))
    return int(token_ids[np.argmax(scores + noise)])
