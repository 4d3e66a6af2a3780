"""A draft's guesses are what the draft alone would say next, whatever happened to the sequence before."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from forge import UsageError
from forge.backends.devices import create_backend
from forge.engine.proposer import ProposalRequest
from forge.engine.rng import DrawName, Purpose
from forge.engine.sampling import BrokenLogits, choose, distribution, penalized
from forge.engine.sampling_params import SamplingParams
from forge.model.loader import load_qwen3, open_weights
from forge.model.manual_batch import one_prefill
from forge.model.model import Draw
from forge.model.qwen3 import Qwen3
from forge.speculation import draft as draft_module
from forge.speculation.draft import DraftProposer, check_same_tokenizer
from forge.speculation.leases import Lease, LeaseRevoked, lease_model
from forge.tokenizer import Tokenizer
from tests.engine.scripted import ScriptedModel, muddled
from tests.engine.test_interruption import interrupted_at
from tests.small_models import small_tokenizer, write_small_qwen3
from tests.speculation.proposers import VOCAB, scripted_draft
from tests.speculation.requests import GREEDY, proposed, request

SAMPLED = SamplingParams(temperature=0.8, top_k=9, repetition_penalty=1.3)


def forwards(proposer: DraftProposer) -> list[list[int]]:
    """The rows of each sequence in each forward since the last call."""
    out, proposer.model.forwards = proposer.model.forwards, []
    return out


def alone(request: ProposalRequest, k: int, logits_after=muddled) -> list[int]:
    """The oracle: the model asked for one token after another with the whole text."""
    tokens, params = list(request.token_ids), request.draw.params
    for _ in range(k):
        scores = penalized(logits_after(tokens), request.draw._replace(history=tokens))
        if params.greedy:
            tokens.append(int(scores.argmax()))
        else:
            purpose = Purpose.PROPOSE if request.independent else Purpose.SAMPLE
            tokens.append(
                distribution(scores, params).draw(DrawName.of(request.draw._replace(history=tokens), purpose))
            )
    return tokens[len(request.token_ids) :]


@dataclass
class World:
    """Sequences that are proposed for, accepted, rejected, left alone and ended at random."""

    rng: np.random.Generator
    proposer: DraftProposer
    vocab_size: int = VOCAB
    max_length: int = 44
    texts: dict[int, list[int]] = field(default_factory=dict)
    born: int = 0

    def requests(self) -> list[ProposalRequest]:
        while len(self.texts) < 6:
            self.texts[self.born] = self.rng.integers(1, self.vocab_size, size=self.rng.integers(1, 9)).tolist()
            self.born += 1
        asked = self.rng.permutation(list(self.texts))[: self.rng.integers(1, 5)].tolist()
        return [
            request(
                self.texts[seq_id],
                k=int(self.rng.integers(0, 6)),
                seq_id=seq_id,
                params=GREEDY if seq_id % 2 else SAMPLED,
                seed=seq_id,
                independent=seq_id % 3 == 0,
            )
            for seq_id in asked
        ]

    def go_on(self, requests, proposals) -> None:
        """Accept some of each proposal and add a token of the target's own, or end the sequence."""
        for asked, proposal in zip(requests, proposals, strict=True):
            num_accepted = int(self.rng.integers(0, len(proposal) + 1)) if self.rng.random() < 0.7 else len(proposal)
            self.texts[asked.seq_id] += [*proposal.token_ids[:num_accepted], int(self.rng.integers(1, self.vocab_size))]
            if len(self.texts[asked.seq_id]) > self.max_length or self.rng.random() < 0.03:
                del self.texts[asked.seq_id]
                self.proposer.forget(asked.seq_id)
            elif self.rng.random() < 0.05:
                self.proposer.forget(asked.seq_id)  # preempted
            elif self.rng.random() < 0.05:
                del self.texts[asked.seq_id][self.rng.integers(1, 4) :]  # the id was given to another text


@pytest.mark.parametrize("kv", ["basic", "off"])
@pytest.mark.parametrize("seed", range(6))
def test_guesses_are_the_drafts_own_for_any_history_and_batch(kv, seed):
    proposer = scripted_draft(kv=kv)
    world = World(np.random.default_rng(seed), proposer)
    for _ in range(80):
        requests = world.requests()
        proposals = proposer.propose(requests)
        for asked, proposal in zip(requests, proposals, strict=True):
            assert list(proposal.token_ids) == alone(asked, asked.max_tokens)
        proposer.cache.check_invariants()
        world.go_on(requests, proposals)
    for seq_id in list(world.texts):
        proposer.forget(seq_id)

    assert proposer.cache.stats().used_blocks == 0
    assert not proposer._held


@pytest.mark.parametrize("seed", range(4))
def test_with_too_little_room_there_are_fewer_guesses_and_they_are_right(seed):
    proposer = scripted_draft(max_num_seqs=2)
    world = World(np.random.default_rng(seed), proposer)
    lengths = []
    for _ in range(80):
        requests = world.requests()
        proposals = proposer.propose(requests)
        for asked, proposal in zip(requests, proposals, strict=True):
            assert list(proposal.token_ids) == alone(asked, len(proposal))
        lengths += [len(proposal) for proposal in proposals if proposal]
        assert sum(len(proposal) > 0 for proposal in proposals) == min(2, sum(r.max_tokens > 0 for r in requests))
        proposer.cache.check_invariants()
        world.go_on(requests, proposals)

    assert max(lengths) == 5


@pytest.fixture(scope="module", params=["cpu", "reference"])
def model(request, tmp_path_factory) -> Qwen3:
    path = write_small_qwen3(tmp_path_factory.mktemp("model") / "small.gguf", tensor_type="Q8_0", seed=3)
    with open_weights(path) as weights:
        return load_qwen3(weights, create_backend(request.param, threads=1))


class ListeningDraft(DraftProposer):
    """Keeps the logits that it guesses from, by the text that they follow."""

    def _append(self, draft, logits):
        self.heard[tuple(draft.text)] = logits.copy()
        super()._append(draft, logits)


def test_a_models_logits_have_the_bits_that_it_has_alone(model):
    proposer = ListeningDraft(model, vocab_size=model.vocab_size, max_num_seqs=6, max_model_len=64)
    proposer.heard = {}
    world = World(np.random.default_rng(0), proposer, vocab_size=model.vocab_size)
    for _ in range(30):
        requests = world.requests()
        world.go_on(requests, proposer.propose(requests))

    assert len(proposer.heard) > 100
    for text, logits in proposer.heard.items():
        assert logits.tobytes() == one_prefill(model, list(text))[-1].tobytes()


# What a call costs


def test_a_new_text_is_read_once_and_the_rest_is_one_row_per_guess():
    proposer = scripted_draft()

    proposed(proposer, [1, 2, 3, 4, 5], k=3)

    assert forwards(proposer) == [[5], [1], [1]]


@pytest.mark.parametrize(("num_accepted", "rows"), [(0, 1), (1, 1), (2, 1), (3, 2)])
def test_after_full_acceptance_the_draft_is_one_row_behind_and_catches_up(num_accepted, rows):
    proposer = scripted_draft()
    text = [1, 2, 3, 4, 5]
    guesses = proposed(proposer, text, k=3)
    forwards(proposer)
    own = guesses[num_accepted] % (VOCAB - 1) + 1 if num_accepted < 3 else 1

    proposed(proposer, [*text, *guesses[:num_accepted], own], k=3)

    assert forwards(proposer) == [[rows], [1], [1]]
    assert proposer.cache.computed_length(0) == len(text) + num_accepted + 1 + 2


def test_sequences_share_forwards_and_leave_when_they_have_what_they_asked_for():
    proposer = scripted_draft()

    found = proposer.propose([request([1, 2], 1), request([3], 4, seq_id=1), request([4] * 9, 2, seq_id=2)])

    assert [len(proposal) for proposal in found] == [1, 4, 2]
    assert [sorted(rows) for rows in forwards(proposer)] == [[1, 2, 9], [1, 1], [1], [1]]


def test_a_long_text_is_read_in_parts(monkeypatch):
    monkeypatch.setattr(draft_module, "CATCH_UP_ROWS", 8)
    proposer = scripted_draft()
    requests = [request(range(1, 12), 2), request([5], 2, seq_id=1), request(range(2, 10), 2, seq_id=2)]

    proposals = proposer.propose(requests)

    assert [list(found.token_ids) for found in proposals] == [alone(asked, 2) for asked in requests]
    assert forwards(proposer)[:3] == [[8], [3, 1, 4], [4]], "at most 8 rows, and none of a text without room"


def test_one_batch_is_laid_out_for_all_guesses_of_a_call(monkeypatch):
    laid_out = []

    def spy(parts, block_size, original=draft_module.flat_batch):
        laid_out.append([len(part.token_ids) for part in parts])
        return original(parts, block_size)

    monkeypatch.setattr(draft_module, "flat_batch", spy)
    proposer = scripted_draft()

    proposer.propose([request([1, 2], 8), request([3], 8, seq_id=1)])

    assert laid_out == [[2, 1], [1, 1]], "the texts, then the seven further tokens of both"
    assert len(forwards(proposer)) == 8


def test_nothing_asked_for_is_nothing_done():
    proposer = scripted_draft()

    assert proposer.propose([]) == []
    assert proposed(proposer, [1, 2], k=0) == []
    assert forwards(proposer) == []


# Limits


def test_guesses_end_with_the_drafts_context():
    proposer = scripted_draft(max_model_len=8)

    assert [len(proposed(proposer, [1] * length, k=4)) for length in (4, 5, 6, 8, 9, 20)] == [4, 4, 3, 1, 0, 0]


def test_who_is_not_asked_about_gives_way_the_longest_unasked_first():
    proposer = scripted_draft(max_num_seqs=2)
    for seq_id in (0, 1, 0, 2):
        assert proposed(proposer, [1, 2, 3], seq_id=seq_id)
    forwards(proposer)

    proposed(proposer, [1, 2, 3, 4], k=1, seq_id=0)  # still there: its fourth token is all that is computed

    assert forwards(proposer) == [[1]]
    assert list(proposer._held) == [2, 0]


def test_padding_beyond_the_targets_vocabulary_is_never_guessed():
    def likes_the_last(tokens):
        return np.arange(VOCAB, dtype=np.float32)

    proposer = scripted_draft(likes_the_last, vocab_size=VOCAB - 3)

    assert proposed(proposer, [1], k=2) == [VOCAB - 4] * 2
    for seed in range(30):
        hot = SamplingParams(temperature=9.0)
        assert max(proposed(proposer, [1], k=3, params=hot, seed=seed)) < VOCAB - 3


def test_logits_that_are_no_numbers_are_reported_and_the_next_call_works():
    broken = [True]

    def script(tokens):
        return np.full(VOCAB, np.nan, np.float32) if broken[0] and len(tokens) == 4 else muddled(tokens)

    proposer = scripted_draft(script)
    with pytest.raises(BrokenLogits):
        proposed(proposer, [1, 2])
    broken[0] = False

    assert proposed(proposer, [1, 2]) == alone(request([1, 2]), 4)


# Sampling


def test_under_sampling_each_guess_comes_with_the_odds_it_was_drawn_at():
    proposer = scripted_draft()
    asked = request([1, 2, 3], 4, params=SAMPLED, seed=9, independent=True)

    (proposal,) = proposer.propose([asked])

    tokens = [1, 2, 3]
    for token_id, odds in zip(proposal.token_ids, proposal.distributions, strict=True):
        expected = distribution(
            penalized(muddled(tokens), Draw(SamplingParams(repetition_penalty=1.3), 9, 0, tokens)), SAMPLED
        )
        assert odds.token_ids.tolist() == expected.token_ids.tolist()
        assert odds.probabilities.tolist() == expected.probabilities.tolist()
        tokens.append(token_id)
    again = {"params": SAMPLED, "independent": True}
    assert proposed(proposer, [1, 2, 3], seed=9, **again) == list(proposal.token_ids)
    assert len({tuple(proposed(proposer, [1, 2, 3], seed=seed, **again)) for seed in range(9)}) > 1


def test_a_draft_chooses_as_the_target_would_from_its_logits():
    (proposal,) = scripted_draft().propose([request([1, 2, 3], 4, params=SAMPLED, seed=9)])

    tokens = [1, 2, 3]
    for token_id in proposal.token_ids:
        assert token_id == choose(muddled(tokens), Draw(SAMPLED, 9, 0, tokens)).token_id
        tokens.append(token_id)
    assert proposal.distributions is None


def test_greedy_guesses_have_no_odds():
    (proposal,) = scripted_draft().propose([request([1, 2])])

    assert proposal.distributions is None


# Interruptions: Ctrl-C, a revoked lease


def revoked_at(number: int, lease: Lease, model: ScriptedModel) -> None:
    """Revoke the lease during the forward of that number."""
    forward = model.forward

    def counting(batch, storage):
        nonlocal number
        number -= 1
        if number < 0:
            lease.revoke()
        return forward(batch, storage)

    model.forward = counting


@pytest.mark.parametrize("number", range(5))
def test_a_lease_revoked_in_any_forward_ends_the_call_after_that_forward(number):
    proposer = scripted_draft()
    model = proposer.model
    lease = lease_model(proposer, "draft")
    revoked_at(number, lease, model)

    if number == 3:  # in the last one: there is nothing left to use it for
        assert proposed(proposer, [1, 2, 3]) == alone(request([1, 2, 3]), 4)
    elif number < 3:
        with pytest.raises(LeaseRevoked, match="draft"):
            proposed(proposer, [1, 2, 3])
        assert len(model.forwards) == number + 1
    else:
        proposed(proposer, [1, 2, 3])
        lease.revoke()
    assert lease.wait_released(0)
    with pytest.raises(LeaseRevoked):
        proposed(proposer, [1, 2, 3])
    proposer.forget(0)
    assert proposer.cache.stats().used_blocks == 0


@pytest.mark.parametrize("kv", ["basic", "off"])
def test_after_an_interruption_anywhere_the_next_guesses_are_right(kv):
    texts = ([1, 2, 3, 4, 5], [6, 7])

    def propose(proposer, *longer):
        return proposer.propose([request([*text, *longer], 3, seq_id=i) for i, text in enumerate(texts)])

    line, interrupted = 0, True
    while interrupted:
        proposer = scripted_draft(kv=kv)
        propose(proposer)
        interrupted = interrupted_at(line, partial(propose, proposer, 9))
        found = propose(proposer, 9, 8)
        for text, proposal in zip(texts, found, strict=True):
            assert list(proposal.token_ids) == alone(request([*text, 9, 8]), 3), f"after line {line}"
        proposer.cache.check_invariants()
        for seq_id in range(2):
            proposer.forget(seq_id)
        assert proposer.cache.stats().used_blocks == 0
        line += 1

    assert line > 100


@pytest.mark.parametrize("kv", ["basic", "paged", "off"])
def test_forgetting_that_is_interrupted_anywhere_loses_no_block(kv):
    line, interrupted = 0, True
    while interrupted:
        proposer = scripted_draft(kv=kv)
        proposer.propose([request([1, 2, 3, 4, 5], 3, seq_id=0), request([6, 7], 3, seq_id=1)])
        interrupted = interrupted_at(line, partial(proposer.forget, 0))
        assert proposed(proposer, [6, 7, 9], seq_id=1) == alone(request([6, 7, 9]), 4), f"after line {line}"
        proposer.cache.check_invariants()
        proposer.forget(0)
        proposer.forget(1)
        assert proposer.cache.stats().used_blocks == 0
        line += 1

    assert line > 10


# Tokenizers


def tokenizer(tmp_path, name: str, **changes) -> Tokenizer:
    path = write_small_qwen3(tmp_path / f"{name}.gguf", metadata=changes.pop("metadata", None), **changes)
    with open_weights(path) as weights:
        return Tokenizer(weights.tokenizer_spec())


def test_equal_tokenizers_are_accepted_whatever_the_padding_and_the_quantization(tmp_path):
    target = tokenizer(tmp_path, "target")

    check_same_tokenizer(target, tokenizer(tmp_path, "q8", tensor_type="Q8_0", num_layers=1))
    check_same_tokenizer(target, tokenizer(tmp_path, "padded", vocab_size=320))


def test_tokenizers_that_differ_are_refused_with_what_differs(tmp_path):
    target = tokenizer(tmp_path, "target")
    names = small_tokenizer(288)
    tokens, merges = list(names["tokenizer.ggml.tokens"]), list(names["tokenizer.ggml.merges"])
    a, b = tokens.index("a"), tokens.index("b")
    tokens[a], tokens[b] = "b", "a"
    swapped = tokenizer(tmp_path, "swapped", metadata={"tokenizer.ggml.tokens": tokens})
    reordered = tokenizer(tmp_path, "merges", metadata={"tokenizer.ggml.merges": merges[::-1]})

    with pytest.raises(UsageError, match=f"token {a} is 'a' to the target and 'b' to the draft") as raised:
        check_same_tokenizer(target, swapped)
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="merges differ"):
        check_same_tokenizer(target, reordered)
