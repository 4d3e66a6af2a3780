"""Distillation: a draft learns to say what the target would say next.

Speculative decoding accepts a guess only if it is the target's own choice, so a draft is trained on the target's distribution rather
than on the corpus: the loss is KL(target || draft) plus the cross-entropy of the target's most likely token. A quarter of the rows is
corpus text, the rest is text that the target wrote itself, greedily and at a temperature of 0.8: when the draft is used, that is the
text it continues. The draft's embedding starts as the target's, projected on its principal directions.

The draft first learns to copy (`COPYING_SCHEDULE`). A draft that had not, after 4 M tokens, agreed with the target at 66 % of the names,
kinds, objects and places that a story repeats, and at 93 % of the tokens that are none of these. After 3 M tokens of distillation a draft
that had learned to copy differed from the target at 8.5 % of all tokens, one that had not at 10.6 %.

References: Hinton et al. 2015 (arXiv 1503.02531); DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from .corpus.documents import FACTS, HELD_OUT
from .data import Rows
from .evaluate import TEMPERATURE
from .network import Qwen3
from .sampling import extend
from .train import MILLION, Part, Phase, Schedule, compiled, half_precision

FIRST_DOCUMENT = 500_000_000  # rows for a draft come from documents that the target was not trained on
PROMPTS = HELD_OUT // 10 * 7  # and what the target continues, from others again
WRITTEN_ROWS = 192  # rows that the target writes at a time
WRITTEN_USES = 4  # how often each of them is used
WRITERS = 2  # threads that write them, each its share
STARTS = (3, 8, 16, 60, 160)  # tokens of a document that the target continues
ARGMAX_WEIGHT = 1.0
COPYING_SCHEDULE = Schedule((Phase(8 * MILLION, 32, 128, FACTS, rehearsal=1.0),))
DRAFT_SCHEDULE = Schedule((Phase(14 * MILLION, 16, 256, answer_weight=1.0),), decay_from=0.4)
BAD_DRAFT_SCHEDULE = Schedule((Phase(MILLION, 2, 256, answer_weight=1.0),), decay_from=0.3)


def project_embedding(target: Qwen3, draft: Qwen3) -> None:
    """Start the draft's embedding as the best low-rank image of the target's, at the scale of a fresh one."""
    with torch.no_grad():
        weight = target.token_embd.weight
        directions = torch.linalg.svd(weight - weight.mean(0), full_matrices=False).Vh[: draft.config.embedding_length]
        draft.token_embd.weight.copy_(weight @ directions.T)


class TargetText:
    """Rows written by the target: the start of a document, continued greedily or at `TEMPERATURE`.

    Which rows a training step gets depends on its number alone, so that a run that is resumed gets the same.
    """

    def __init__(self, target: Qwen3, tokenizer: Tokenizer, length: int) -> None:
        self.target, self.tokenizer, self.length = target, tokenizer, length
        self.pool: tuple[int, Tensor] | None = None
        self.writers = ThreadPoolExecutor(WRITERS, initializer=torch.set_num_threads, initargs=(1,))

    def rows(self, first: int, count: int) -> Tensor:
        """[count, length + 1]: rows `first` and on of an endless sequence."""
        return torch.stack([self._row(number) for number in range(first, first + count)])

    def _row(self, number: int) -> Tensor:
        pool, place = divmod(number, WRITTEN_ROWS * WRITTEN_USES)
        if self.pool is None or self.pool[0] != pool:
            self.pool = (pool, self._write(pool))
        use, place = divmod(place, WRITTEN_ROWS)
        order = torch.randperm(WRITTEN_ROWS, generator=torch.Generator().manual_seed(pool * WRITTEN_USES + use))
        return self.pool[1][order[place]]

    def _write(self, pool: int) -> Tensor:
        start = STARTS[pool % len(STARTS)]
        source = Rows(self.tokenizer, PROMPTS + pool * 10 * WRITTEN_ROWS)
        prompts = source.batch(WRITTEN_ROWS, start - 1).chunk(WRITERS)
        temperature = torch.tensor([0.0, TEMPERATURE]).repeat(WRITTEN_ROWS // WRITERS // 2)

        def write(number: int) -> Tensor:
            generator = torch.Generator().manual_seed(pool * WRITERS + number)
            return extend(self.target, prompts[number], self.length + 1, temperature, generator)

        return torch.cat(list(self.writers.map(write, range(WRITERS))))


class Distillation:
    """What `train` needs to distil: rows by the target in place of some of a batch's, and a loss that compares distributions."""

    def __init__(self, target: Qwen3, tokenizer: Tokenizer, length: int) -> None:
        self.text = TargetText(target.eval(), tokenizer, length)
        self.target = half_precision(target)

    def prepare(self, tokens: Tensor, step: int) -> None:
        """Replace three rows of four by the target's text, in place."""
        written = torch.arange(len(tokens)) % 4 != 0
        count = int(written.sum())
        tokens[written] = self.text.rows(step * count, count)

    def loss(self, draft: Qwen3, tokens: Tensor, weights: Tensor, answered: Tensor) -> Part:
        """The divergence, and as the plain loss the number of positions where both would choose another token."""
        with torch.no_grad():
            wanted = self.target.hidden(tokens[:, :-1]).flatten(0, 1)
        hidden = draft.hidden(tokens[:, :-1])
        loss, plain = _divergence(
            hidden.flatten(0, 1),
            draft.token_embd.weight,
            wanted,
            self.target.token_embd.weight.detach(),
            weights.flatten(),
        )
        with torch.no_grad():
            chosen = F.linear(hidden[answered], draft.token_embd.weight.to(hidden.dtype)).argmax(-1)
        return Part(loss, plain, chosen)


@compiled
def _divergence(
    hidden: Tensor, embedding: Tensor, wanted: Tensor, target_embedding: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    likely = F.log_softmax(F.linear(hidden, embedding.to(hidden.dtype)).float(), -1)
    target = F.log_softmax(F.linear(wanted, target_embedding.to(wanted.dtype)).float(), -1)
    choice = target.argmax(-1)
    divergence = (target.exp() * (target - likely)).sum(-1)
    losses = divergence - ARGMAX_WEIGHT * likely.gather(-1, choice[:, None])[:, 0]
    return (losses * weights).sum(), (likely.detach().argmax(-1) != choice).float().sum()
