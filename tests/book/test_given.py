"""What is known without a run: the shape of the model, and what other programs took."""

import os

import pytest

from forge.book import given
from forge.book.given import LoadMeter, OtherLoad, model_facts


@pytest.fixture
def clock(monkeypatch):
    """Time as it is told: [now, seconds that this process has used]."""
    told = [0.0, 0.0]
    monkeypatch.setattr(given.time, "monotonic", lambda: told[0])
    monkeypatch.setattr(given, "_own_seconds", lambda: told[1])
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return told


def statistics(tmp_path, busy_seconds: float):
    path = tmp_path / "stat"
    ticks = int(busy_seconds * os.sysconf("SC_CLK_TCK"))
    path.write_text(f"cpu  {ticks - 3} 1 1 999999 9 0 0 1 0 0\ncpu0 0 0\n")
    return path


def test_our_own_time_is_not_counted(tmp_path, clock):
    meter = LoadMeter(statistics(tmp_path, 100))
    statistics(tmp_path, 113)
    clock[:] = [10.0, 10.0]
    load = meter.read()
    assert load.processors == pytest.approx(0.3) and not load.is_busy
    clock[:] = [10.0, 1.0]
    assert meter.read().is_busy and "1.2 of 2 processors" in meter.read().sentence


def test_a_run_that_is_too_short_is_not_judged(tmp_path, clock):
    meter = LoadMeter(statistics(tmp_path, 100))
    statistics(tmp_path, 101)
    clock[0] = 0.1
    assert not meter.read().is_busy


def test_the_load_average_counts_where_the_system_tells_no_more(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.7, 0, 0), raising=False)
    meter = LoadMeter(tmp_path / "none")
    clock[0] = 1.0
    assert meter.read() == OtherLoad(1.7, 2)


def test_the_bundled_model():
    facts = model_facts()
    assert (facts["num_layers"], facts["num_kv_heads"], facts["head_dim"], facts["vocab_size"]) == (12, 2, 64, 4096)
    assert facts["kv_bytes_per_token"] == 12 * 2 * 2 * (64 + 4) and facts["has_weights"] and facts["weight_bytes"] > 1e7
    assert model_facts(kv_dtype="float32")["kv_bytes_per_token"] == 12288
    assert model_facts(kv_dtype="bfloat16")["kv_bytes_per_token"] == 6144
    assert model_facts(device="reference")["kv_bytes_per_token"] == 12288
    assert model_facts(device="cuda")["bytes_per_number"] == 2


def test_a_model_without_weights_has_every_fact_too():
    facts = model_facts("hash")
    assert set(facts) == set(model_facts()) and not facts["has_weights"] and facts["kv_bytes_per_token"] == 8
