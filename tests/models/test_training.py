import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from models.corpus.documents import FACTS, STORIES, document
from models.data import AnswerKinds, Rehearsal, Rows, Weigher, repeated
from models.distil import WRITTEN_ROWS, TargetText
from models.export import export, load
from models.network import Qwen3, attend
from models.optimizer import Optimizer, orthogonalize
from models.train import Phase, Schedule, train

from .conftest import TINY

LOOKING_UP = Phase(512, 4, 64, FACTS, rehearsal=0.25, text_weight=0.1)
SHORT = Schedule((LOOKING_UP, Phase(512, 4, 64, STORIES, copy_weight=3.0)))


def test_attention_in_halves_is_causal_attention():
    q, k, v = torch.randn(2, 4, 160, 16), torch.randn(2, 2, 160, 16), torch.randn(2, 2, 160, 16)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v), expected, rtol=1e-4, atol=1e-5)


def test_a_row_holds_whole_documents_and_padding(tokenizer):
    rows = Rows(tokenizer, 7)
    end = rows.end_of_text
    documents = {tuple(tokenizer.encode(document(n)).ids) for n in range(7, 207)}
    for row in (rows.row(1500) for _ in range(5)):
        parts, current = [], []
        for token in row:
            if token != end:
                current.append(token)
            elif current:
                parts.append(tuple(current))
                current = []
        assert not current
        assert set(parts) <= documents


def test_rows_go_on_from_what_a_checkpoint_holds(tokenizer):
    rows = Rows(tokenizer)
    rows.batch(3, 256)
    resumed = Rows(tokenizer, rows.next_document, rows.waiting)
    assert torch.equal(rows.batch(3, 256), resumed.batch(3, 256))


def test_no_document_is_dealt_twice(tokenizer):
    rows = Rows(tokenizer)
    dealt = []
    for _ in range(20):
        before = set(rows.waiting) | {rows.next_document}
        rows.row(400)
        dealt += sorted(set(range(min(before), rows.next_document)) - set(rows.waiting) - set(dealt))
    assert len(dealt) == len(set(dealt))
    assert not set(dealt) & set(rows.waiting)


def test_answers_copies_and_padding_have_their_weights(tokenizer):
    text = "The fox ran. A fox sat.<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n" + "<|endoftext|>" * 3
    tokens = torch.tensor([tokenizer.encode(text).ids])
    weigher = Weigher(tokenizer)
    weights = weigher.weights(tokens, text=0.1, copy=3.0, answer=5.0)[0]
    words = [tokenizer.decode([t], skip_special_tokens=False) for t in tokens[0, 1:].tolist()]
    assert [w for w, weight in zip(words, weights.tolist(), strict=True) if weight == 3.0] == [" fox"]
    assert [w for w, weight in zip(words, weights.tolist(), strict=True) if weight == 5.0] == ["yes"]
    assert weights[-2:].tolist() == [0.0, 0.0]
    assert words[weigher.answers(tokens)[0].tolist().index(True)] == "yes"


def test_repeated_tokens_are_those_that_stand_further_left():
    assert repeated(torch.tensor([[5, 7, 5, 5, 9, 7]])).tolist() == [[False, False, True, True, False, True]]


def test_answers_are_counted_by_kind(tokenizer):
    ids = [tokenizer.encode(word).ids[0] for word in ("yes", "no", "happy", "forest")]
    counts: dict[str, list[int]] = {}
    AnswerKinds(tokenizer).count(torch.tensor(ids), torch.tensor([True, False, True, False]), counts)
    assert counts == {"yes_no": [1, 2], "ending": [1, 1], "place": [0, 1]}


def test_rehearsal_is_the_same_for_the_same_seed(tokenizer):
    rehearsal = Rehearsal(tokenizer)
    assert torch.equal(rehearsal.batch(2, 100, seed=5), rehearsal.batch(2, 100, seed=5))
    assert not torch.equal(rehearsal.batch(2, 100, seed=5), rehearsal.batch(2, 100, seed=6))


@pytest.mark.parametrize("shape", [(3, 32, 96), (3, 96, 32), (2, 48, 48)])
def test_an_orthogonalized_matrix_has_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))).float())
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_an_update_is_the_same_on_any_number_of_workers(tiny):
    results = []
    for workers in (1, 3):
        model = Qwen3(TINY, seed=1)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        with ThreadPoolExecutor(workers) as pool:
            Optimizer(model, 1e-2, 1e-2, 0.05).step(1.0, pool, workers)
        results.append(model)
    for one, other, start in zip(*(m.parameters() for m in (*results, tiny)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)
        assert not torch.equal(one, start)


def test_training_that_was_stopped_ends_with_the_same_weights(tokenizer, tmp_path):
    straight, stopped, resumed = (Qwen3(TINY, seed=1) for _ in range(3))
    train(straight, tokenizer, SHORT, tmp_path / "a", threads=2)
    train(stopped, tokenizer, SHORT, tmp_path / "b", threads=2, stop_at=256)
    state = train(resumed, tokenizer, SHORT, tmp_path / "b", threads=2)
    assert state.tokens == SHORT.tokens
    for one, other, never in zip(straight.parameters(), resumed.parameters(), stopped.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, never)


def test_a_checkpoint_of_another_recipe_is_refused(tokenizer, tiny, tmp_path):
    train(tiny, tokenizer, SHORT, tmp_path, threads=1, stop_at=256)
    with pytest.raises(SystemExit, match="another recipe: remove its folder"):
        train(Qwen3(TINY), tokenizer, Schedule(SHORT.phases, matrix_rate=1e-3), tmp_path, threads=1)


def test_the_log_drops_the_steps_that_are_done_again(tokenizer, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("models.train.LOG_STEPS", 1)
    train(tiny, tokenizer, SHORT, tmp_path, threads=1, stop_at=512)
    log = tmp_path / "log.jsonl"
    log.write_text(log.read_text() + json.dumps({"step": 3}) + "\n")
    train(Qwen3(TINY), tokenizer, SHORT, tmp_path, threads=1)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["tokens"] == SHORT.tokens


def test_training_learns(tokenizer, tmp_path):
    """A hundred steps on one pattern: its loss falls far below that of a guess."""
    schedule = Schedule((Phase(100 * 4 * 64, 4, 64, rehearsal=1.0),), warmup_steps=5)
    train(Qwen3(TINY, seed=1), tokenizer, schedule, tmp_path, threads=1)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 1


def test_a_file_gives_back_what_was_exported(tokenizer, tiny, tmp_path):
    export(tiny, tokenizer, tmp_path / "tiny.gguf", "q8_0")
    model, read = load(tmp_path / "tiny.gguf")
    text = document(3)
    assert read.encode(text).ids == tokenizer.encode(text).ids
    for saved, original in zip(model.parameters(), tiny.parameters(), strict=True):
        torch.testing.assert_close(saved, original, rtol=0, atol=original.abs().max().item() / 127)


def test_what_the_target_writes_for_a_step_depends_on_its_number_alone(tokenizer, tiny):
    one, other = TargetText(tiny, tokenizer, 24), TargetText(tiny, tokenizer, 24)
    number = WRITTEN_ROWS - 2
    one.rows(0, 3)
    assert torch.equal(one.rows(number, 4), other.rows(number, 4))
    assert one.rows(0, 4).shape == (4, 25)
