"""`forge cuda` from beginning to end, with the CPU for a GPU and made-up limits."""

import json

import pytest

from forge import llm as llm_module
from forge.backends import devices
from forge.backends.cuda import backend as backend_module
from forge.bench import limits_worker
from forge.cli.main import main
from forge.experiments import cuda
from tests.backends.cuda.test_graphs import StandIn
from tests.small_models import write_small_qwen3


class OnCpu(backend_module.CudaBackend):
    """The CUDA device's operations on the CPU."""

    def __init__(self, **options):
        super().__init__("cpu", **{"dtype": "float32", "graphs": True} | options)


LIMITS = {"device": "a GPU", "read_bytes_per_second": 4e12, "products_per_second": 4e14}


@pytest.fixture
def on_a_gpu_of_sorts(monkeypatch, device):
    if device == "cuda":
        return
    monkeypatch.setattr(devices, "why_not_cuda", lambda: None)
    monkeypatch.setattr(llm_module, "is_gpu", lambda device: False)
    monkeypatch.setattr(devices, "is_large_gpu", lambda device: False)
    monkeypatch.setattr(backend_module, "CudaBackend", OnCpu)
    monkeypatch.setattr(backend_module, "Graphs", StandIn)
    monkeypatch.setattr(limits_worker, "measure_gpu", lambda *_: LIMITS)
    monkeypatch.setattr(cuda, "planned_steps", lambda config: ())  # it takes a while, and has tests of its own


@pytest.mark.slow
def test_three_runs_say_the_same_and_say_how_they_were_launched(on_a_gpu_of_sorts, tmp_path, capsys):
    model = str(write_small_qwen3(tmp_path / "m.gguf", num_layers=1))

    status = main(["cuda", "ab", "2", "-m", model, "--json", "--record", str(tmp_path / "run.json")])

    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "run.json").read_text()) == found
    assert status == 0
    assert [run["name"] for run in found["runs"]] == ["cpu", "cuda, kernel by kernel", "cuda, graphs"]
    assert [run["modes"] for run in found["runs"]] == [[], ["eager"] * 2, ["graph"] * 2]
    assert found["source"] == "measured"
    assert len({tuple(run["token_ids"]) for run in found["runs"]}) == 1
    # One layer, and the head: 288 x 64.
    assert found["weights"] == 64 * (128 + 2 * 64) + 64 * 128 + 3 * 64 * 96 + 288 * 64
