"""Guessing with a smaller model, which has a KV cache of its own.

Proposing K tokens takes K forwards of the draft. The first computes whatever the draft has not seen yet (the whole text
of a new sequence; after a rejection the target's own token; after full acceptance also the last guess, which nobody
needed until then), and each of the others one row per sequence. So that those cost a forward and nothing else, the
batch's arrays are made once and advanced in place.

What the draft holds of a sequence is what its text and its cache have in common; the rest is truncated. So it follows
every rejection and rebuilds whatever was lost, and nobody has to tell it.

A draft never makes anybody wait. Where its pool is full, sequences that are not asked about give way, and if that is
not enough a sequence gets fewer guesses or none.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from forge.cache.factory import DEFAULT_BLOCK_SIZE, CacheSize, create_kv_cache
from forge.cache.kv_cache import KvCache, OutOfBlocks
from forge.cache.kv_storage import KvStorage
from forge.engine.draws import Purpose, uniform
from forge.engine.proposer import NO_PROPOSAL, Proposal, ProposalRequest, Proposer
from forge.engine.sampling import Distribution, check_logits, distribution, penalized
from forge.errors import UsageError
from forge.model.forward_batch import ForwardBatch, SequenceRows, flat_batch
from forge.model.model import Model
from forge.speculation.leases import Lease
from forge.tokenizer import Tokenizer

CATCH_UP_ROWS = 512
"""Rows per forward at most while a draft reads a text that is new to it."""


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises `UsageError`, saying what differs, unless a token id means the same to both."""
    if target.fingerprint == draft.fingerprint:
        return
    raise UsageError(f"the draft model cannot guess for this target: {_difference(target, draft)}")


def _difference(target: Tokenizer, draft: Tokenizer) -> str:
    ours, theirs = target.spec, draft.spec
    pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
    token_id = next((token_id for token_id, (our, their) in pairs if our != their), None)
    if token_id is not None:
        our, their = target.token_text(token_id), draft.token_text(token_id)
        return f"token {token_id} is {our!r:.40} to the target and {their!r:.40} to the draft"
    if list(ours.merges) != list(theirs.merges):
        return f"their merges differ ({len(ours.merges)} in the target, {len(theirs.merges)} in the draft)"
    return f"the target has {target.vocab_size} tokens and the draft {draft.vocab_size}, and the rest is not padding"


@dataclass(eq=False)
class _Run:
    """One sequence's share of a `propose`."""

    index: int
    """Which request it answers."""
    request: ProposalRequest
    num_tokens: int
    """How many tokens it will propose: as many as were asked for and fit."""
    computed: int
    """Tokens whose keys and values are there."""
    block_table: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    """The guesses so far."""
    distributions: list[Distribution] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.request.token_ids)


class DraftProposer(Proposer):
    """A draft model with its own cache and storage, for all sequences of one engine."""

    def __init__(
        self,
        lease: Lease[Model],
        cache: KvCache,
        storage: KvStorage,
        *,
        vocab_size: int,
        max_model_len: int,
        name: str = "draft",
    ):
        """lease: lends the draft model. vocab_size: the target's; what the draft's vocabulary has beyond it is never
        guessed. max_model_len: positions that the draft can compute."""
        self.name = name
        self.lease = lease
        self.cache = cache
        self.storage = storage
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._held: OrderedDict[int, list[int]] = OrderedDict()
        """Each sequence's tokens whose keys and values are in the cache; the least recently asked about comes first."""

    @classmethod
    def of_model(
        cls,
        model: Model,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        kv: str = "basic",
        kv_dtype: str = "float32",
        block_size: int = DEFAULT_BLOCK_SIZE,
        num_blocks: int | None = None,
        name: str = "draft",
    ) -> "DraftProposer":
        """A draft with a pool of its own, for an engine with these limits. Its storage may raise MemoryError."""
        length = min(max_model_len, model.max_position_embeddings)
        layout = model.kv_layout(0, block_size, kv_dtype)
        size = CacheSize(length, max_num_seqs, block_size, layout.bytes_per_token, num_blocks)
        cache, storage_blocks = create_kv_cache(kv, size)
        storage = model.new_storage(model.kv_layout(storage_blocks, block_size, kv_dtype))
        return cls(Lease("draft", model), cache, storage, vocab_size=vocab_size, max_model_len=length, name=name)

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Raises `LeaseRevoked`, and `BrokenLogits` if the draft's logits are no numbers."""
        self.lease.check()
        proposals = [NO_PROPOSAL] * len(requests)
        runs = self._begin(requests)
        self._first_guesses(runs)
        self._further_guesses(runs)
        for run in runs:
            self._keep(run)
            proposals[run.index] = Proposal(tuple(run.token_ids), tuple(run.distributions) or None)
        return proposals

    def forget(self, seq_id: int) -> None:
        with suppress(KeyError):
            self.cache.remove(seq_id)
        self._held.pop(seq_id, None)

    # The cache

    def _begin(self, requests: Sequence[ProposalRequest]) -> list[_Run]:
        """Reserve what this call will write, as far as there is room. Those that will propose most come first."""
        asked = {request.seq_id for request in requests if request.max_tokens > 0}
        runs = []
        for index, request in enumerate(requests):
            fits = self.max_model_len - len(request.token_ids) + 1  # the last guess is not computed
            run = self._reserve(index, request, min(request.max_tokens, fits), asked)
            if run is not None:
                runs.append(run)
        return sorted(runs, key=lambda run: -run.num_tokens)

    def _reserve(self, index: int, request: ProposalRequest, num_tokens: int, asked: set[int]) -> _Run | None:
        """Own the slots for as many of `num_tokens` guesses as there is room for; None if that is none."""
        seq_id = request.seq_id
        while num_tokens > 0:
            try:
                computed = self._matched(request)
                copies = self.cache.reserve(seq_id, len(request.token_ids) - computed + num_tokens - 1)
            except OutOfBlocks:
                idle = next((other for other in self._held if other not in asked), None)
                if idle is not None:
                    self.forget(idle)
                else:
                    num_tokens -= 1
                continue
            self.storage.copy_blocks(copies)
            return _Run(index, request, num_tokens, computed, self.cache.block_table(seq_id))
        return None

    def _matched(self, request: ProposalRequest) -> int:
        """Make the cache hold a beginning of the request's tokens and nothing else; return how many.

        The last token is left out in any case: it is computed for its logits.
        """
        seq_id, most = request.seq_id, len(request.token_ids) - 1
        held = self._held.setdefault(seq_id, [])
        self._held.move_to_end(seq_id)
        try:
            computed = self.cache.computed_length(seq_id)
        except KeyError:
            computed = self.cache.add(seq_id, request.token_ids, max_cached=most)
            held[:] = request.token_ids[:computed]
        kept = min(_num_common(held, request.token_ids), computed, most)
        del held[kept:]
        self.cache.truncate(seq_id, kept)
        return kept

    def _keep(self, run: _Run) -> None:
        """Note what has been computed: the request's tokens and all guesses but the last."""
        held = self._held[run.request.seq_id]
        new = [*run.request.token_ids[len(held) :], *run.token_ids[:-1]]
        self.cache.commit(run.request.seq_id, new)
        held += new

    # The guesses

    def _first_guesses(self, runs: list[_Run]) -> None:
        """Compute what the draft has not seen of each text, and guess what follows it."""
        behind = runs
        while behind:
            parts = list(self._next_rows(behind))
            logits = iter(self._forward(flat_batch([rows for _, rows in parts], self.storage.layout.block_size)))
            for run, rows in parts:
                run.computed += len(rows.token_ids)
                if rows.logit_rows:
                    self._guess(run, next(logits))
            behind = [run for run in behind if run.computed < run.length]

    def _next_rows(self, behind: list[_Run]) -> Iterator[tuple[_Run, SequenceRows]]:
        """What the next forward computes of the runs that are behind: `CATCH_UP_ROWS` in all at most."""
        room = CATCH_UP_ROWS
        for run in behind:
            token_ids = run.request.token_ids[run.computed : run.computed + room]
            if not token_ids:
                return
            room -= len(token_ids)
            is_last = run.computed + len(token_ids) == run.length
            logit_rows = range(len(token_ids) - is_last, len(token_ids))
            yield run, SequenceRows(token_ids, run.computed, run.block_table, logit_rows)

    def _further_guesses(self, runs: list[_Run]) -> None:
        """One row per run and forward, each the guess before. The arrays are made once and advanced in place."""
        most = max((run.num_tokens for run in runs), default=0)
        if most < 2:
            return
        block_size = self.storage.layout.block_size
        tables = np.full((len(runs), max(len(run.block_table) for run in runs)), -1, np.int32)
        for table, run in zip(tables, runs, strict=True):
            table[: len(run.block_table)] = run.block_table
        token_ids, slots = np.empty((2, len(runs)), np.int32)
        positions = np.array([run.length for run in runs], np.int32)
        context_lens = positions + np.int32(1)
        count, every = len(runs), np.arange(len(runs) + 1, dtype=np.int32)
        batch = None
        for step in range(1, most):
            while runs[count - 1].num_tokens <= step:  # those that propose least come last
                count, batch = count - 1, None
            if batch is None:
                rows = every[:count]
                batch = ForwardBatch(
                    token_ids[:count],
                    positions[:count],
                    every[: count + 1],
                    slots[:count],
                    tables[:count],
                    context_lens[:count],
                    rows,
                )
            for row, run in enumerate(runs[:count]):
                place, offset = divmod(run.length + step - 1, block_size)
                token_ids[row] = run.token_ids[-1]
                slots[row] = run.block_table[place] * block_size + offset
            for run, logits in zip(runs, self._forward(batch), strict=False):
                self._guess(run, logits)
            positions += 1
            context_lens += 1

    def _forward(self, batch: ForwardBatch) -> np.ndarray:
        with self.lease.use() as model:
            return model.forward(batch, self.storage)

    def _guess(self, run: _Run, logits: np.ndarray) -> None:
        """Take the next guess from the logits after everything so far: float32 `[draft's vocab]`."""
        logits = logits[: self.vocab_size]
        request, params = run.request, run.request.params
        likeliest = check_logits(logits)
        scores = logits
        if params.changes_logits:  # a guess may take the prompt for output
            scores = penalized(logits, [*request.token_ids, *run.token_ids], params, num_prompt_tokens=0)
        if not params.greedy:
            q = distribution(scores, params)
            position = run.length + len(run.token_ids)
            draw = uniform(request.seed, request.sample_index, position, Purpose.PROPOSE, request.branch)
            run.token_ids.append(q.draw(draw))
            run.distributions.append(q)
        else:
            run.token_ids.append(likeliest if scores is logits else int(scores.argmax()))


def _num_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens the two begin with in common. By halves, because comparing slices is faster than a loop."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
