"""The shape of the model that the reader runs is known before anything has run."""

from forge.book.model_facts import model_facts


def test_the_bundled_model():
    facts = model_facts()
    assert (facts["num_layers"], facts["num_kv_heads"], facts["head_dim"], facts["vocab_size"]) == (12, 2, 64, 4096)
    assert facts["kv_bytes_per_token"] == 6144 and facts["has_weights"] and facts["weight_bytes"] > 1e7
    assert model_facts(kv_dtype="float32")["kv_bytes_per_token"] == 12288
    assert model_facts(kv_dtype="int8")["kv_bytes_per_token"] == 12 * 2 * 2 * (64 + 4)


def test_a_model_without_weights_has_every_fact_too():
    facts = model_facts("hash")
    assert set(facts) == set(model_facts()) and not facts["has_weights"] and facts["kv_bytes_per_token"] == 8
