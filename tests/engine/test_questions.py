"""What each task asks of an engine, and what it makes of the readouts: without a model."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from forge.engine.task import Readout, Task
from forge.engine.tasks import (
    Classification,
    Question,
    classify,
    classify_by_head,
    classify_prompt,
    embed,
    rerank,
    rerank_candidates,
    rerank_prompt,
    score,
    single_token,
)
from forge.errors import UsageError
from forge.tokenizer.byte_tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
PROMPTS = [(1, 2), (3,)]
LN_2 = math.log(2)


def read_out(question: Question, *candidates: tuple[float, ...]):
    """What a question makes of these log probabilities, one tuple for each prompt."""
    return question.finish([Readout(candidates=logprobs) for logprobs in candidates])


def test_labels_of_one_token_are_candidates():
    question = classify(PROMPTS, [[7], [8]], ["good", "bad"])
    assert question.requests == [(prompt, Task(candidates=(7, 8))) for prompt in PROMPTS]
    good, bad = read_out(question, (-3.0, -3.0 - LN_2), (-2000.0, -1000.0))
    assert good.probabilities == pytest.approx({"good": 2 / 3, "bad": 1 / 3}) and good.label == "good"
    assert bad.probabilities == pytest.approx({"good": 0, "bad": 1}) and bad.logprobs == {"good": -2000, "bad": -1000}


def test_labels_of_several_tokens_are_scored_behind_each_prompt():
    question = classify(PROMPTS, [[7], [8, 9]], ["good", "bad"])
    assert question.requests == [
        ([*prompt, *label], Task(score_from=len(prompt))) for prompt in PROMPTS for label in ([7], [8, 9])
    ]
    of_good, of_bad = (((5, -9.0), (7, -1.0)),), (((8, -0.25), (5, -9.0)), ((9, -0.5),))
    readouts = [Readout(scores=scores) for scores in (of_good, of_bad, of_good, of_bad)]
    assert [found.logprobs for found in question.finish(readouts)] == [{"good": -1.0, "bad": -0.75}] * 2


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[1]], "two labels or more, got 1"),
        ([[1], []], "must not be empty"),
        ([[], [1]], "must not be empty"),
        ([[1], [2], [2]], "labels 'b' and 'c' are the same tokens"),
        ([[1, 2], [3], (1, 2)], "labels 'a' and 'c' are the same tokens"),
    ],
)
def test_labels_that_are_none_are_refused(labels, message):
    with pytest.raises(UsageError, match=message):
        classify(PROMPTS, labels, "abc")


def test_labels_of_several_tokens_have_a_prompt():
    with pytest.raises(UsageError, match="a prompt must not be empty"):
        classify([(1, 2), ()], [[7], [8, 9]], ["good", "bad"])


def test_a_head_has_a_candidate_for_each_label_and_two_for_one():
    question = classify_by_head(PROMPTS, ["a", "b", "c"])
    assert question.requests == [(prompt, Task(candidates=(0, 1, 2))) for prompt in PROMPTS]
    (found,) = read_out(question, (-1.0, -0.5, -2.0))
    assert (found.label, found.score) == ("b", None) and sum(found.probabilities.values()) == pytest.approx(1)
    question = classify_by_head(PROMPTS, ["reward"])
    assert question.requests == [(prompt, Task(candidates=(0, 1))) for prompt in PROMPTS]
    assert read_out(question, (-LN_2, -3.0)) == [
        Classification({"reward": pytest.approx(0.5)}, {"reward": -LN_2}, 3.0 - LN_2)
    ]


def test_a_score_has_each_token_and_as_many_alternatives_as_requested():
    question = score([((1,), (2, 3)), ((), (4, 5))], top=1)
    assert question.requests == [([1, 2, 3], Task(score_from=1, top=1)), ([4, 5], Task(score_from=1, top=1))]
    rows = (((9, -0.5), (2, -1.0)), ((3, -0.25), (8, -2.0)))
    first, second = question.finish([Readout(scores=rows), Readout(scores=(((5, -4.0),),))])
    assert (first.token_ids, first.logprobs) == ((2, 3), (-1.0, -0.25))
    assert first.alternatives == (((9, -0.5),), ((3, -0.25),))
    assert first.total == -1.25 and first.perplexity == pytest.approx(math.exp(1.25 / 2))
    assert (second.token_ids, second.logprobs) == ((5,), (-4.0,))
    assert score([((1, 2, 3), (4,))], top=0).requests == [([1, 2, 3, 4], Task(score_from=3))]


@pytest.mark.parametrize("pair", [((), (1,)), ((1, 2), ()), ((), ())])
def test_a_score_needs_a_token_and_one_before_it(pair):
    with pytest.raises(UsageError, match="there is nothing to score"):
        score([((1,), (2,)), pair], top=0)
    with pytest.raises(UsageError, match="top is a number of tokens, and not -1"):
        score([((1,), (2,))], top=-1)


def test_embeddings_are_stacked_in_order():
    question = embed(PROMPTS, "mean")
    assert question.requests == [(prompt, Task(pooling="mean")) for prompt in PROMPTS]
    vectors = np.eye(2, dtype=np.float32)
    assert question.finish([Readout(embedding=vector) for vector in vectors]).tolist() == vectors.tolist()


def test_reranking_is_the_share_of_yes_whatever_the_logits():
    question = rerank(PROMPTS, 7, 8)
    assert question.requests == [(prompt, Task(candidates=(7, 8))) for prompt in PROMPTS]
    assert read_out(question, (-1.0, -1.0), (-1.0, -1.0 - LN_2)) == pytest.approx([1 / 2, 2 / 3])
    assert read_out(question, (-9999.0, 0.0), (0.0, -9999.0)) == pytest.approx([0, 1])


def test_a_heads_answers_are_its_labels_yes_and_no_or_its_only_one():
    assert rerank_candidates(BYTES, ["relevance"]) == (0, 1)
    assert rerank_candidates(BYTES, ["no", "maybe", "yes"]) == (2, 0)
    assert rerank_candidates(BYTES, ["no", "yes"]) == (1, 0)
    with pytest.raises(UsageError, match="classifies into no, maybe; a reranker has one label, or yes and no"):
        rerank_candidates(BYTES, ["no", "maybe"])
    with pytest.raises(UsageError, match="'yes' is 3 tokens in this model's vocabulary, and one is needed"):
        rerank_candidates(BYTES, [])
    assert single_token(BYTES, "a") == ord("a")
    of_words = SimpleNamespace(encode=lambda text, add_special_tokens: [7] * add_special_tokens + [len(text)])
    assert rerank_candidates(of_words, []) == (3, 2)


def test_prompts_ask_for_the_labels_and_for_what_the_reranker_was_trained_with():
    text = BYTES.decode(classify_prompt(BYTES, "It rains.", ["yes", "no"]))
    assert "It rains.\n\nWhich is it: yes or no? Answer with one word." in text and text.endswith("assistant\n")
    assert "It rains.\n\nWet?" in BYTES.decode(classify_prompt(BYTES, "It rains.", ["yes", "no"], "Wet?"))
    prompt = rerank_prompt(BYTES, "who", "me", "Find.")
    assert BYTES.encode("<|im_start|>", allow_special=True)[0] in prompt
    text = BYTES.decode(prompt)
    assert "<|im_start|>user\n<Instruct>: Find.\n<Query>: who\n<Document>: me<|im_end|>" in text
