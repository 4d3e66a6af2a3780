"""Answers of prefill-only requests: in slices and in chunks they have the bits of the whole."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge.engine import readout
from forge.engine.readout import max_logit_rows, read_out, run_separate_forwards
from forge.engine.sampling import BrokenLogits
from forge.engine.step_plan import PlanItem
from forge.engine.task import NO_READOUT, Readout, Task
from tests.engine.schedules import sequence

LENGTH, VOCAB, SLICE, FIRST = 21, 32, 8, 5
STORAGE: Any = SimpleNamespace(layout=SimpleNamespace(block_size=4))
SCORED = Task(sample=True, score_from=1, top=2, candidates=(3, 5))


def row(token_id: int, position: int) -> np.ndarray:
    return np.random.default_rng((token_id, position)).standard_normal(VOCAB).astype(np.float32)


class Rows:
    """A model whose rows follow from a token and its position alone."""

    vocab_size = VOCAB

    def __init__(self, broken_at: int = -1):
        self.sizes: list[int] = []
        self._broken_at = broken_at

    def forward(self, batch, storage) -> np.ndarray:
        self.sizes.append(len(batch.token_ids))
        rows = [row(int(batch.token_ids[index]), int(batch.positions[index])) for index in batch.logit_rows]
        broken = [np.nan if batch.positions[index] == self._broken_at else 0 for index in batch.logit_rows]
        return np.array(rows, np.float32).reshape(-1, VOCAB) + np.array(broken, np.float32)[:, None]

    hidden = forward


def item_of(
    task: Task, start: int = 0, num_tokens: int = LENGTH, partial: Readout = NO_READOUT, first: int = FIRST
) -> PlanItem:
    prompt = sequence(0, tokens=LENGTH, token_ids=[*range(first, first + LENGTH)], task=task, partial=partial)
    rows, remaining = task.chunk_rows(start, num_tokens, LENGTH), LENGTH - start - num_tokens
    samples = task.sample and not remaining
    return PlanItem(0, prompt, start, num_tokens, rows, samples, "prefill_only", (*range(6),), remaining)


def rows_of(item: PlanItem) -> np.ndarray:
    return np.stack([row(FIRST + item.start + index, item.start + index) for index in item.logit_rows])


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(readout, "SLICE_BYTES", 4 * VOCAB * SLICE)
    monkeypatch.setattr(readout, "MIN_SLICE_ROWS", 2)


@pytest.mark.parametrize("task", [SCORED, Task(score_from=12), Task(candidates=(3,), score_from=5)])
def test_a_prompt_in_slices_is_answered_as_in_one(task):
    item, model = item_of(task), Rows()
    (result,) = run_separate_forwards([item], model, STORAGE)

    assert model.sizes == [SLICE, SLICE, LENGTH - 2 * SLICE]
    assert result.readout == read_out(item, rows_of(item)) and len(result.readout.scores) == LENGTH - task.score_from
    assert len(result.last_row) == task.sample
    assert not task.sample or np.array_equal(result.last_row[0], row(FIRST + LENGTH - 1, LENGTH - 1))


def test_scores_and_candidates_are_natural_log_probabilities():
    item, task = item_of(SCORED), Task(candidates=(3, 5))
    logprobs = [np.log(np.exp(values) / np.exp(values).sum()) for values in rows_of(item)]
    answer = read_out(item, rows_of(item))

    assert answer.candidates == pytest.approx([logprobs[-1][3], logprobs[-1][5]], rel=1e-5)
    for scored, token_id, expected in zip(answer.scores, item.sequence.token_ids[1:], logprobs[:-1], strict=True):
        assert dict(scored) == pytest.approx({i: expected[i] for i in (*np.argsort(-expected)[:2], token_id)}, rel=1e-5)
    assert read_out(item_of(task), rows_of(item_of(task))) == Readout(candidates=answer.candidates)


def test_a_prompt_in_chunks_is_answered_as_in_one_and_chooses_among_candidates_at_its_end():
    whole = read_out(item_of(SCORED), rows_of(item_of(SCORED)))
    partial = NO_READOUT
    for start, num_tokens in ((0, 1), (1, 8), (9, 10), (19, 2)):
        item = item_of(SCORED, start, num_tokens, partial)
        (result,) = run_separate_forwards([item], Rows(), STORAGE)
        assert result.readout == read_out(item, rows_of(item)), "in slices as in one"
        partial = result.readout
        assert bool(partial.candidates) == (not item.remaining)
    assert partial == whole


def test_a_prompt_that_is_computed_again_forgets_what_its_chunks_gave():
    stale = Readout(scores=(((1, -1.0),),) * 4)
    item = item_of(SCORED, partial=stale)
    assert read_out(item, rows_of(item)) == read_out(item_of(SCORED), rows_of(item))


def test_logits_that_are_no_numbers_are_the_result_of_their_own_item():
    results = run_separate_forwards([item_of(SCORED), item_of(Task(pooling="last"))], Rows(broken_at=13), STORAGE)
    assert isinstance(results[0].error, BrokenLogits) and results[1].error is None


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_have_length_1_and_the_same_bits_in_chunks_and_beside_others(pooling):
    task, other = Task(pooling=pooling), item_of(Task(pooling="mean"), first=7)
    whole = run_separate_forwards([item_of(task)], Rows(), STORAGE)
    beside = run_separate_forwards([other, item_of(task)], Rows(), STORAGE)[1].readout
    chunks = NO_READOUT
    for start, num_tokens in ((0, 1), (1, 8), (9, 12)):
        ((chunks, _, _),) = run_separate_forwards([item_of(task, start, num_tokens, chunks)], Rows(), STORAGE)

    rows = rows_of(item_of(task)).astype(np.float64).sum(axis=0)
    embedding = whole[0].readout.embedding
    assert embedding == pytest.approx(rows / np.linalg.norm(rows), rel=1e-6)
    for answer in (beside, chunks):
        assert np.array_equal(answer.embedding, embedding)


def test_a_slice_has_the_rows_that_fit_and_some_in_any_case():
    assert max_logit_rows(VOCAB) == SLICE and max_logit_rows(VOCAB // 2) == 2 * SLICE
    assert max_logit_rows(1 << 40) == 2
