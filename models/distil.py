"""Distillation: the draft learns to say what the target would say next.

Speculative decoding accepts a guess only if it is the target's own choice, so the draft is trained on the target's distribution rather
than on the corpus: the loss is KL(target || draft) plus the cross-entropy of the target's most likely token. Half of the rows are corpus
text, half are text that the target wrote itself, greedily or sampled: when the draft is used, that is the text it continues.
The draft's embedding starts as the target's, projected on its principal directions.

References: Hinton et al. 2015 (arXiv 1503.02531); DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from .data import Rows
from .network import Qwen3
from .sampling import extend
from .train import Phase

FIRST_DOCUMENT = 500_000_000  # rows for the draft come from documents that the target was not trained on
WRITTEN_ROWS = 32  # rows that the target writes at a time
WRITTEN_USES = 4  # how often each of them is used
ARGMAX_WEIGHT = 1.0
DRAFT_PHASES = (Phase(0.9, 4, 256), Phase(1.0, 4, 512))


def project_embedding(target: Qwen3, draft: Qwen3) -> None:
    """Start the draft's embedding as the best low-rank image of the target's, at the scale of a fresh one."""
    with torch.no_grad():
        weight = target.token_embd.weight
        directions = torch.linalg.svd(weight - weight.mean(0), full_matrices=False).Vh[: draft.config.embedding_length]
        image = weight @ directions.T
        draft.token_embd.weight.copy_(image)


class TargetText:
    """Rows written by the target: the start of a document, continued at a temperature of 0 to 1. Safe to use from several threads."""

    def __init__(self, target: Qwen3, tokenizer: Tokenizer, seed: int) -> None:
        self.target = target
        self.rows = Rows(tokenizer, FIRST_DOCUMENT + 100_000_000)
        self.generator = torch.Generator().manual_seed(seed)
        self.pool: Iterator[Tensor] = iter(())
        self.lock = Lock()

    def batch(self, count: int, length: int) -> Tensor:
        """[count, length + 1]."""
        with self.lock:
            return torch.stack([self._row(length) for _ in range(count)])

    def _row(self, length: int) -> Tensor:
        row = next(self.pool, None)
        if row is None or len(row) != length + 1:
            self.pool = iter(self._write(length))
            row = next(self.pool)
        return row

    def _write(self, length: int) -> list[Tensor]:
        start = int(torch.tensor([3, 6, 12, 40, 200])[torch.randint(5, (1,), generator=self.generator)])
        count = WRITTEN_ROWS if length <= 512 else 4
        prompts = self.rows.batch(count, start - 1)
        temperature = torch.tensor([0.0, 0.0, 0.5, 1.0]).repeat(count // 4)
        written = extend(self.target, prompts, length + 1, temperature, self.generator)
        order = torch.cat([torch.randperm(count, generator=self.generator) for _ in range(WRITTEN_USES)])
        return [written[i] for i in order]


class DistillationLoss:
    """A loss function for `train`: replaces half of the batch by the target's text, and compares distributions."""

    def __init__(self, target: Qwen3, tokenizer: Tokenizer, seed: int) -> None:
        self.target = target.eval()
        self.text = TargetText(self.target, tokenizer, seed)

    def __call__(self, draft: Qwen3, tokens: Tensor, weights: Tensor) -> tuple[Tensor, float]:
        """The loss to minimize, and the share of positions where both would choose the same token (as 1 - agreement)."""
        half = tokens.shape[0] // 2
        tokens = torch.cat((tokens[:half], self.text.batch(tokens.shape[0] - half, tokens.shape[1] - 1)))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            wanted = self.target(tokens[:, :-1]).flatten(0, 1).float()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            logits = draft(tokens[:, :-1]).flatten(0, 1)
        logits = logits.float()
        choice = wanted.argmax(-1)
        log_likely = F.log_softmax(logits, -1)
        divergence = F.kl_div(log_likely, F.log_softmax(wanted, -1), reduction="batchmean", log_target=True)
        loss = divergence + ARGMAX_WEIGHT * F.nll_loss(log_likely, choice)
        disagreement = (logits.argmax(-1) != choice).float().mean().item()
        return loss, disagreement
