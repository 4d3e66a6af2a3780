"""`forge bench cuda`: what is asked of whom, what becomes of a peer that fails, and forge's worker on a small model."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from forge.bench import process
from forge.bench.cases import CUDA_LOADS, CUDA_STEPS, Load, load_figures, percentiles, unique_prompts
from forge.bench.cuda import Effort, Plan, plan_for, run, screen
from forge.bench.process import PeerMissing, ProcessFailed
from forge.bench.transformers_worker import closed_loop
from forge.errors import ForgeError, UsageError
from forge.views.json_output import plain, to_json
from forge.views.screen import draw
from tests.small_models import write_small_qwen3

LIMITS = {
    "device": "a GPU",
    "versions": "torch",
    "memory_bytes": 1 << 30,
    "copy_bytes_per_second": 2e12,
    "read_bytes_per_second": 1e12,
    "products_per_second": 1e14,
}


SERVED = {"kv": "paged", "max_model_len": 24, "max_num_seqs": 2, "num_blocks": 4, "block_size": 16}


class Scripted:
    """Stands in for `BenchProcess`."""

    asked: list[tuple[str, str]]

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def __call__(self, launch):
        self.name = launch.name
        return self

    def close(self):
        pass

    def ask(self, do, **fields):
        self.asked.append((self.name, do))
        answer = self.answers.get((self.name, do)) or self.answers.get(do)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


ANSWERS = {
    "measure_gpu": LIMITS,
    "load": {"description": "it", "seconds": 1.5, "read_bytes": 10**9, "kv_bytes": 10**5},
    "prepare": {"setting": "graph", "seconds": 0.1},
    "turn": {"seconds": [0.004, 0.002, 0.003], "top_tokens": [7]},
    "replay": {"device_seconds": 0.001},
    "requests": {"setting": "in process", "seconds": 2.0, "first_token": [0.1, 0.3], "end": [0.4, 0.6]},
}


@pytest.fixture
def plan(tmp_path) -> Plan:
    model = str(write_small_qwen3(tmp_path / "m.gguf"))
    return Plan(model, steps=CUDA_STEPS[:1], loads=(Load("3in4@2", 3, 4, 2, 2),), effort=Effort(repetitions=2))


def measured(plan, monkeypatch, answers=ANSWERS):
    script = Scripted(answers)
    monkeypatch.setattr(process, "REST_SECONDS", 0)
    monkeypatch.setattr(process, "BenchProcess", script)
    *_, last = run(plan)
    return last, script


def test_each_process_has_the_gpu_to_itself_from_loading_to_its_last_request(plan, monkeypatch):
    result, script = measured(plan, monkeypatch)

    asked = ["load", "prepare", "turn", "turn", "requests"]
    assert script.asked[0][1] == "measure_gpu"
    assert script.asked[1:7] == [("forge", do) for do in [*asked[:-1], "replay", "requests"]]
    assert script.asked[7:9] == [("forge over HTTP", "load"), ("forge over HTTP", "requests")]
    assert script.asked[9:] == [("transformers", do) for do in asked]
    ours, theirs = result["steps"]
    assert ours["seconds"].median == theirs["seconds"].median == 0.003
    assert ours["bandwidth_share"] == pytest.approx((1e9 + 160 * 1e5) / 0.003 / 1e12)
    assert theirs["bandwidth_share"] is None
    assert ours["device_seconds"] == 0.001 and "device_seconds" not in theirs
    assert result["loads"][0]["requests_per_second"] == 1.0
    assert result["loads"][0]["per_token"]["p50"] == pytest.approx(0.1)


def test_a_peer_that_fails_is_left_out_with_its_reason(plan, monkeypatch):
    broken = ANSWERS | {("transformers", "prepare"): ProcessFailed("transformers: out of memory")}
    result, _ = measured(plan, monkeypatch, broken)
    assert [step["contender"] for step in result["steps"]] == ["forge"]
    assert "out of memory" in result["skipped"][0]["reason"]

    missing = ANSWERS | {("transformers", "requests"): PeerMissing("no continuous batching here")}
    result, _ = measured(plan, monkeypatch, missing)
    assert [step["contender"] for step in result["steps"]] == ["forge", "transformers"]
    assert [load["contender"] for load in result["loads"]] == ["forge", "forge over HTTP"]
    assert result["skipped"][0]["name"] == "transformers, 3 in, 4 out, 2 at a time"


def test_if_forge_fails_nothing_is_pretended(plan, monkeypatch):
    with pytest.raises(ProcessFailed):
        measured(plan, monkeypatch, ANSWERS | {("forge", "turn"): ProcessFailed("forge: broke")})


def test_the_screen_and_the_json_show_what_was_measured(plan, monkeypatch, capsys):
    from rich.console import Console

    result, _ = measured(plan, monkeypatch)
    console = Console(width=160)
    draw(console, screen(result | {"interrupted": True}))
    shown = capsys.readouterr().out
    for text in ("a GPU", "decode 1 @ 160", "3.00 (3.00–3.00)", "34 %", "graph", "3 in, 4 out", "interrupted"):
        assert text in shown
    read = json.loads(to_json(plain(result)))
    assert read["steps"][0]["seconds"]["median"] == 0.003 and read["loads"][0]["end"]["p95"] == 0.6


def test_a_plan_takes_the_published_loads_of_its_shape():
    for shape, names in (
        ("qwen3-0.6b", ["128in1@1", "128in32@4"]),
        ("qwen3-4b", [load.name for load in CUDA_LOADS[2:]]),
    ):
        plan = plan_for(shape, "BF16", None, ["all"], "paged")
        assert [load.name for load in plan.loads] == names and plan.steps == CUDA_STEPS
    only = plan_for("qwen3-4b", "BF16", "decode16@160, 512in1@64", ["none"], "paged")
    assert [case.name for case in only.steps] == ["decode16@160"]
    assert [load.requests for load in only.loads] == [2000] and only.peers == ()


@pytest.mark.parametrize(("only", "peers"), [("decode7", ["all"]), (None, ["vllm"])])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(only, peers):
    with pytest.raises(UsageError, match="there are"):
        plan_for("qwen3-0.6b", "BF16", only, peers, "paged")


def test_without_a_gpu_the_command_says_so_in_one_line(capsys):
    from forge.backends.devices import why_not_cuda
    from forge.cli.main import main

    if why_not_cuda() is None:
        pytest.skip("this machine has a GPU")
    assert main(["bench", "cuda", "--quick"]) == 2
    assert capsys.readouterr().err.startswith("forge: forge bench cuda needs")


class Countdown:
    """A manager whose requests give a token in turn, and whose clock ticks once a token."""

    def __init__(self):
        self.left, self.now, self.most = {}, 0, 0

    def add_request(self, prompt, max_new_tokens, streaming, eos_token_id):
        assert streaming and eos_token_id == -1, "its first token is to be seen, and it is not to end early"
        self.left[f"request {len(self.left)} at {self.now}"] = max_new_tokens
        self.most = max(self.most, len(self.left))
        return list(self.left)[-1]

    def get_result(self, timeout):
        self.now += 1
        request_id, left = next(iter(self.left.items()))
        del self.left[request_id]
        if left > 1:
            self.left[request_id] = left - 1
        return SimpleNamespace(request_id=request_id, generated_tokens=[7], error=None, is_finished=lambda: left == 1)


def test_a_closed_loop_keeps_as_many_requests_as_asked_for_and_times_each():
    manager = Countdown()

    moments, seconds = closed_loop(manager, [[1]] * 6, output_tokens=3, concurrency=2, clock=lambda: manager.now)

    assert manager.most == 2 and len(moments) == 6 and seconds == 18
    assert moments[:2] == [(1, 5), (2, 6)], "the second waits its turn, and each for the other"


@pytest.mark.parametrize("result", [None, SimpleNamespace(error="out of memory")])
def test_a_manager_that_gives_no_result_is_an_error(result):
    manager = Countdown()
    manager.get_result = lambda timeout: result
    with pytest.raises(RuntimeError, match=r"no result|out of memory"):
        closed_loop(manager, [[1]], output_tokens=3, concurrency=2)


def test_no_two_prompts_begin_alike():
    prompts = unique_prompts(200, 5, 300, seed=1)
    assert len({prompt[0] for prompt in prompts}) == 200
    assert all(len(prompt) == 5 and all(0 <= token < 300 for token in prompt) for prompt in prompts)
    assert prompts == unique_prompts(200, 5, 300, seed=1)


def test_percentiles_are_values_that_were_measured():
    assert percentiles([5.0]) == {"mean": 5.0, "p50": 5.0, "p95": 5.0}
    assert percentiles([float(n) for n in range(1, 101)]) == {"mean": 50.5, "p50": 50.0, "p95": 95.0}
    one_token = {"setting": "", "seconds": 1.0, "first_token": [0.1], "end": [0.1]}
    assert load_figures(Load("", 3, 1, 1, 1), one_token)["per_token"] is None


def test_forges_worker_answers_every_question(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from forge import llm
    from forge.backends.cuda.backend import CudaBackend
    from forge.bench.forge_worker import ForgeWorker

    monkeypatch.setattr(llm, "create_backend", lambda *_, **__: CudaBackend("cpu", kernels="torch"))
    model = str(write_small_qwen3(tmp_path / "m.gguf"))
    worker = ForgeWorker()

    sizes = {"max_model_len": 24, "max_num_seqs": 2, "num_blocks": 4, "block_size": 16}
    loaded = worker.load(
        model, device="reference", kv="basic", **sizes
    )  # whatever it is called, the line above makes it
    prepared = worker.prepare("decode", 16, [list(range(17)), list(range(1, 18))])
    turn = worker.turn(2, 0.0)
    assert worker.replay(0.0) == {"device_seconds": None}
    answer = worker.requests(asdict(Load("", 5, 3, 2, 6)))

    assert loaded["read_bytes"] > 0 and loaded["kv_bytes"] == 2 * 2 * 2 * 32 * 2
    assert prepared["setting"] == "eager" and len(turn["top_tokens"]) == 2 and len(turn["seconds"]) >= 2
    assert len(answer["first_token"]) == len(answer["end"]) == 6
    assert all(0 < first <= end for first, end in zip(answer["first_token"], answer["end"], strict=True))


@pytest.mark.slow
def test_the_server_is_asked_over_http_and_gone_afterwards(tmp_path):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from forge.bench.server_worker import ServerWorker

    worker = ServerWorker()
    loaded = worker.load(str(write_small_qwen3(tmp_path / "m.gguf")), device="reference", **SERVED)
    server = worker.server
    try:
        answer = worker.requests(asdict(Load("", 5, 3, 2, 4)))
    finally:
        worker.close()

    assert loaded["seconds"] > 0 and "forge serve" in loaded["description"]
    assert len(answer["first_token"]) == len(answer["end"]) == 4
    assert all(0 < first <= end for first, end in zip(answer["first_token"], answer["end"], strict=True))
    assert server._process.poll() is not None


def test_a_server_that_cannot_start_says_why(tmp_path):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from forge.bench.server_worker import ServerWorker

    worker = ServerWorker()
    with pytest.raises(ForgeError, match=r"did not start: .*toaster"):
        worker.load(str(write_small_qwen3(tmp_path / "m.gguf")), device="toaster", **SERVED)
    worker.close()
