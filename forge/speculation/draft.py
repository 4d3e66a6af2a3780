"""Drafting with a smaller model, which has a KV cache of its own.

Proposing K tokens takes K forwards of the draft. The first computes all that the draft has not seen yet (the whole text
of a new sequence; after a rejection the target's own token; after full acceptance also the last draft token, which was
never an input before), and each of the others one row per sequence. So that those cost a forward and nothing else, the
batch's arrays are made once and advanced in place.

The draft chooses a token as the target does, by the same definition of sampling with the same noise (`sampling`), so
under sampling the two agree about as often as their distributions overlap. For the acceptance rule `rejection` it draws
independently instead, and returns the distributions.

What a text and the draft's cache have in common is used; the rest of the cache is truncated. So it follows every
rejection and rebuilds what was lost without being told. After an operation that never ended (Ctrl-C, a full memory) the
next one begins with an empty cache.

A draft never makes a sequence wait. Where its pool is full, sequences that are not in the request are dropped, and if
that is not enough a sequence gets fewer draft tokens or none.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from forge.cache.factory import DEFAULT_BLOCK_SIZE, CacheSize, create_kv_cache
from forge.cache.kv_cache import OutOfBlocks
from forge.engine.containers import num_common
from forge.engine.engine import Interruptible
from forge.engine.proposer import NO_PROPOSAL, Proposal, ProposalRequest, Proposer
from forge.engine.rng import DrawName, Purpose
from forge.engine.sampling import Distribution, check_logits, choose_token, distribution, penalized
from forge.errors import UsageError
from forge.model.forward_batch import ForwardBatch, SequenceRows, flat_batch
from forge.model.model import Model
from forge.tokenizer import Tokenizer

CATCH_UP_ROWS = 512
"""Rows per forward at most while a draft reads a text that is new to it."""


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer, hint: str = "") -> None:
    """Raise `UsageError`, saying what differs and then `hint`, unless a token id means the same to both."""
    if target.fingerprint != draft.fingerprint:
        raise UsageError(f"the draft model cannot draft for this target: {_difference(target, draft)}{hint}")


def _difference(target: Tokenizer, draft: Tokenizer) -> str:
    ours, theirs = target.spec, draft.spec
    shared = range(min(len(ours.tokens), len(theirs.tokens)))
    token_id = next((token_id for token_id in shared if ours.tokens[token_id] != theirs.tokens[token_id]), None)
    if token_id is not None:
        our, their = target.token_text(token_id), draft.token_text(token_id)
        return f"token {token_id} is {our!r:.40} to the target and {their!r:.40} to the draft"
    if list(ours.merges) != list(theirs.merges):
        return f"their merges differ ({len(ours.merges)} in the target, {len(theirs.merges)} in the draft)"
    return f"the target has {target.vocab_size} tokens and the draft {draft.vocab_size}, and the rest is not padding"


@dataclass(eq=False)
class _Draft:
    """The draft of one request under construction."""

    request: ProposalRequest
    num_tokens: int
    """How many it will have: as many as were requested and fit."""
    computed: int
    """Tokens whose keys and values are in the cache."""
    block_table: tuple[int, ...]
    num_cached: int
    """The same before anything was computed."""
    distributions: list[Distribution] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = len(self.request.token_ids)
        self.text = list(self.request.token_ids)
        """The request's tokens, and the draft tokens so far."""
        self.draw = self.request.draw._replace(history=self.text, matcher=None)
        """That of the next draft token."""


class DraftProposer(Proposer):
    """A draft model with its own cache and storage, for all sequences of one engine."""

    def __init__(
        self,
        model: Model,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        kv: str = "basic",
        kv_dtype: str = "float32",
        block_size: int = DEFAULT_BLOCK_SIZE,
        name: str = "draft",
    ):
        """Give the draft a pool of its own, for an engine with these limits. Raises MemoryError if it does not fit.

        vocab_size: the target's; tokens that only the draft has are never proposed.
        """
        self.name, self.model, self.vocab_size = name, model, vocab_size
        self.max_model_len = min(max_model_len, model.max_position_embeddings)
        layout = model.kv_layout(0, block_size, kv_dtype)
        size = CacheSize(self.max_model_len, max_num_seqs, block_size, layout.bytes_per_token)
        self.cache = create_kv_cache(kv, size)
        self.storage = model.new_storage(replace(layout, num_blocks=self.cache.num_blocks))
        self._held: OrderedDict[int, list[int]] = OrderedDict()
        """Each sequence's tokens whose keys and values are in the cache, least recently requested first."""
        self._operation = Interruptible(self._empty)

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Propose tokens with the draft model. Raises `ModelUnavailable`, and `BrokenLogits` if its logits are not
        finite."""
        self.model.check_available()
        with self._operation:
            drafts = self._begin(requests)
            self._first_tokens(drafts)
            self._further_tokens(drafts)
            proposals = {draft.request.seq_id: self._commit(draft) for draft in drafts}
        return [proposals.get(request.seq_id, NO_PROPOSAL) for request in requests]

    def forget(self, seq_id: int) -> None:
        """Free a sequence's blocks."""
        with self._operation:
            self._drop(seq_id)

    # The cache

    def _empty(self) -> None:
        """Recover from an operation that never ended."""
        self._held.clear()
        self.cache.clear()

    def _drop(self, seq_id: int) -> None:
        if seq_id in self.cache:
            self.cache.remove(seq_id)
        self._held.pop(seq_id, None)

    def _begin(self, requests: Sequence[ProposalRequest]) -> list[_Draft]:
        """Reserve what this call will write, as far as there is room. Drafts with the most tokens come first."""
        requested = {request.seq_id for request in requests if request.max_tokens > 0}
        drafts = [draft for request in requests if (draft := self._reserve(request, requested)) is not None]
        return sorted(drafts, key=lambda draft: -draft.num_tokens)

    def _reserve(self, request: ProposalRequest, requested: set[int]) -> _Draft | None:
        """Reserve slots for as many draft tokens as are requested and there is room for; None if that is none."""
        seq_id = request.seq_id
        fits = self.max_model_len - len(request.token_ids) + 1  # the last draft token is never computed
        num_tokens = min(request.max_tokens, fits)
        while num_tokens > 0:
            try:
                computed = self._matched(request)
                copies = self.cache.reserve(seq_id, len(request.token_ids) - computed + num_tokens - 1)
            except OutOfBlocks:
                idle = next((held for held in self._held if held not in requested), None)
                if idle is not None:
                    self._drop(idle)
                else:
                    num_tokens -= 1
                continue
            self.storage.copy_blocks(copies)
            return _Draft(request, num_tokens, computed, self.cache.block_table(seq_id), computed)
        return None

    def _matched(self, request: ProposalRequest) -> int:
        """Make the cache hold a prefix of the request's tokens and nothing else; return its length.

        The last token is always left out: it is computed for its logits.
        """
        seq_id, most = request.seq_id, len(request.token_ids) - 1
        held = self._held.setdefault(seq_id, [])
        self._held.move_to_end(seq_id)
        if seq_id not in self.cache:
            held[:] = request.token_ids[: self.cache.add(seq_id, request.token_ids, max_cached=most)]
        kept = min(num_common(held, request.token_ids), self.cache.computed_length(seq_id), most)
        del held[kept:]
        self.cache.truncate(seq_id, kept)
        return kept

    def _commit(self, draft: _Draft) -> Proposal:
        """Commit what has been computed, the request's tokens and all draft tokens but the last; return the draft."""
        seq_id = draft.request.seq_id
        held = self._held[seq_id]
        new = draft.text[len(held) : -1]
        self.cache.commit(seq_id, new)
        held += new
        token_ids, distributions = tuple(draft.text[draft.length :]), tuple(draft.distributions) or None
        return Proposal(token_ids, distributions, cached=(draft.num_cached, len(held)))

    # The draft tokens

    def _first_tokens(self, drafts: list[_Draft]) -> None:
        """Compute what the draft has not seen of each text, and choose what follows it."""
        behind = drafts
        while behind:
            parts = list(self._next_rows(behind))
            logits = iter(self._forward(flat_batch([rows for _, rows in parts], self.storage.layout.block_size)))
            for draft, rows in parts:
                draft.computed += len(rows.token_ids)
                if rows.logit_rows:
                    self._append(draft, next(logits))
            behind = [draft for draft in behind if draft.computed < draft.length]

    def _next_rows(self, behind: list[_Draft]) -> Iterator[tuple[_Draft, SequenceRows]]:
        """Yield what the next forward computes of the drafts that are behind: `CATCH_UP_ROWS` in all at most."""
        room = CATCH_UP_ROWS
        for draft in behind:
            token_ids = draft.request.token_ids[draft.computed : draft.computed + room]
            if not token_ids:
                return
            room -= len(token_ids)
            is_last = draft.computed + len(token_ids) == draft.length
            logit_rows = range(len(token_ids) - is_last, len(token_ids))
            yield draft, SequenceRows(token_ids, draft.computed, draft.block_table, logit_rows)

    def _further_tokens(self, drafts: list[_Draft]) -> None:
        """Compute one row per draft in each forward: its last token. The arrays are made once and advanced in place."""
        block_size, drafts = self.storage.layout.block_size, [draft for draft in drafts if draft.num_tokens > 1]
        if not drafts:
            return
        rows = [SequenceRows(draft.text[-1:], draft.length, draft.block_table, range(1)) for draft in drafts]
        batch = flat_batch(rows, block_size)
        for step in range(1, drafts[0].num_tokens):
            while drafts[-1].num_tokens <= step:  # the shortest drafts come last
                drafts.pop()
                batch = ForwardBatch(*[array[:-1] for array in vars(batch).values()])
            for row, draft in enumerate(drafts):
                block, offset = divmod(draft.length + step - 1, block_size)
                batch.token_ids[row] = draft.text[-1]
                batch.slot_mapping[row] = draft.block_table[block] * block_size + offset
            for draft, logits in zip(drafts, self._forward(batch), strict=True):
                self._append(draft, logits)
            batch.positions[:] += 1
            batch.context_lens[:] += 1

    def _forward(self, batch: ForwardBatch) -> np.ndarray:
        return np.asarray(self.model.forward(batch, self.storage))

    def _append(self, draft: _Draft, logits: np.ndarray) -> None:
        """Choose the draft's next token from the logits after everything so far: float32 `[draft's vocab]`."""
        logits = logits[: self.vocab_size]
        draw, request = draft.draw, draft.request
        if draw.params.greedy or not request.independent:
            draft.text.append(choose_token(logits, draw))
            return
        check_logits(logits)
        q = distribution(penalized(logits, draw), draw.params)
        draft.text.append(q.draw(DrawName.of(draw, Purpose.PROPOSE, request.branch)))
        draft.distributions.append(q)
