import numpy as np

from forge.engine.sampling import Distribution


def verify_greedy(argmax, draft):
    emitted = []
    for token, best in zip(draft, argmax, strict=False):
        emitted.append(best)
        if token != best:
            return emitted
    emitted.append(argmax[len(draft)])
    return emitted


def accept(p, q, draw):
    return draw * q < p


def residual(p, q):
    others = np.array([q.probability(token) for token in p.token_ids.tolist()])
    excess = p.probabilities - others
    kept = excess > 0
    if not kept.any():
        return p
    return Distribution(p.token_ids[kept], excess[kept] / excess[kept].sum())


def verify_sampled(p, q, draft, draws, choose):
    emitted = []
    for i, token in enumerate(draft):
        if not accept(p[i].probability(token), q[i].probability(token), draws[i]):
            emitted.append(choose(residual(p[i], q[i])))
            return emitted
        emitted.append(token)
    emitted.append(choose(p[len(draft)]))
    return emitted


def kept_length(start, num_known, num_accepted):
    return start + num_known + num_accepted
