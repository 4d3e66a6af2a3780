"""Pulling models from a hub on this machine: what arrives, what is resumed, what is refused, and in which words."""

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forge.errors import ForgeError, UsageError
from forge.model import catalog as pulled_module
from forge.model.catalog import (
    PulledModel,
    PullName,
    find_pulled,
    is_pull_name,
    pulled_models,
    quant_label,
    resolve_model,
)
from tests.model.fake_hub import COMMIT, FakeHub, running
from tests.small_models import gguf_beginning

huggingface_hub = pytest.importorskip("huggingface_hub", reason="pulling needs huggingface_hub")

from forge.model import pull as pull_module  # noqa: E402
from forge.model.pull import PullError, pull  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
REPO, FOLDER_REPO = "Someone/Qwen3-Tiny-GGUF", "Someone/Qwen3-Tiny"
Q8 = bytes(range(256)) * 2048  # 512 KiB
Q4 = b"four" * 1000
FILES = {
    "README.md": b"hello",
    "Qwen3-Tiny-Q8_0.gguf": Q8,
    "Qwen3-Tiny-Q4_K_M.gguf": Q4,
    "Qwen3-Tiny-F16.gguf": b"16" * 400,
    "Qwen3-Tiny-BF16.gguf": b"b16" * 400,
    "mmproj-Qwen3-Tiny-F16.gguf": b"eye" * 400,
    "Q8_K/Qwen3-Tiny-Q8_K-00001-of-00002.gguf": b"half" * 400,
}
FOLDER_FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model-00001-of-00002.safetensors": b"one" * 400,
    "model-00002-of-00002.safetensors": b"two" * 400,
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b"{}" * 100,
    "tokenizer_config.json": b"{}",
    "generation_config.json": b"{}",
    "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}',
    "README.md": b"hello",
    "pytorch_model.bin": b"no" * 400,
    "onnx/model.safetensors": b"no" * 400,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder; no token, no retry that waits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "0")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    return tmp_path / "cache" / "forge" / "models"


@pytest.fixture
def hub():
    with running(FakeHub(repos={REPO: dict(FILES), FOLDER_REPO: dict(FOLDER_FILES)})) as hub:
        yield hub


def refused(hub: FakeHub, name: str, kind: type[ForgeError] = PullError) -> str:
    """The message of a pull that fails: one line."""
    with pytest.raises(kind) as caught:
        pull(name, endpoint=hub.url)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- names


@pytest.mark.parametrize(
    ("text", "repo", "quant"),
    [
        ("Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B-GGUF", "Q8_0"),
        ("a/b", "a/b", None),
        ("a/b_c.d:x", "a/b_c.d", "x"),
    ],
)
def test_a_name_is_an_owner_a_repository_and_perhaps_a_quantization(text, repo, quant):
    assert PullName.parse(text) == PullName(repo, quant)
    assert str(PullName.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "qwen", "a/b/c", "a/../b", "/a/b", "a/b:", "a/b:c/d", "../b", "a/b\n", "a b/c", "ä/b"]
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(UsageError, match="is not a model's name on the hub"):
        PullName.parse(text)
    assert not is_pull_name(text)
    assert find_pulled(text) is None


@pytest.mark.parametrize(
    ("file_name", "label"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("qwen3-4b-instruct-2507.q4_k_m.gguf", "q4_k_m"),
        ("Qwen3-0.6B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Qwen3-0.6B-IQ4_XS.gguf", "IQ4_XS"),
        ("Qwen3-0.6B-BF16.gguf", "BF16"),
        ("sub/f16.gguf", "f16"),
        ("Qwen3-0.6B.gguf", "Qwen3-0.6B"),
    ],
)
def test_the_quantization_is_read_off_the_file_name(file_name, label):
    assert quant_label(file_name) == label


# --- what arrives


@pytest.mark.parametrize("details", [True, False], ids=["listed", "asked per file"])
@pytest.mark.parametrize("quant", ["Q8_0", "q8_0"])
def test_one_gguf_file_arrives_and_its_name_means_it_afterwards(hub, cache, quant, details):
    hub.listing_details = details
    pulled = pull(f"{REPO}:{quant}", endpoint=hub.url)

    assert pulled == PulledModel(f"{REPO}:Q8_0", cache / REPO / "Qwen3-Tiny-Q8_0.gguf", len(Q8))
    assert pulled.path.read_bytes() == Q8
    assert resolve_model(f"{REPO}:{quant}") == resolve_model(REPO) == resolve_model(pulled.path) == pulled.path
    assert pulled_models() == (pulled,)


def test_progress_rises_from_nothing_to_the_whole_file(hub):
    calls = []
    pull(f"{REPO}:Q8_0", endpoint=hub.url, on_progress=lambda *call: calls.append(call))

    done = [call[1] for call in calls]
    assert {(name, total) for name, _, total in calls} == {("Qwen3-Tiny-Q8_0.gguf", len(Q8))}
    assert done == sorted(done) and (done[0], done[-1]) == (0, len(Q8))


def test_what_is_here_already_is_not_fetched_again(hub):
    first = pull(f"{REPO}:Q8_0", endpoint=hub.url)
    again = pull(f"{REPO}:Q8_0", endpoint=hub.url)

    assert again == first
    assert len(hub.downloads("Qwen3-Tiny-Q8_0.gguf")) == 1


def test_a_file_that_was_changed_here_is_fetched_again(hub):
    path = pull(f"{REPO}:Q8_0", endpoint=hub.url).path
    path.write_bytes(b"x" * len(Q8))

    assert pull(f"{REPO}:Q8_0", endpoint=hub.url).path.read_bytes() == Q8


def test_a_folder_of_safetensors_arrives_with_config_json_last(hub, cache):
    pulled = pull(FOLDER_REPO, endpoint=hub.url)

    expected = {name: data for name, data in FOLDER_FILES.items() if name not in ("README.md", "pytorch_model.bin")}
    del expected["onnx/model.safetensors"]
    assert pulled.path == cache / FOLDER_REPO
    found = [path for path in pulled.path.rglob("*") if path.is_file() and path.name[0] != "."]
    assert {str(path.relative_to(pulled.path)): path.read_bytes() for path in found} == expected
    weights = hub.downloads("model-00001-of-00002.safetensors")[0]
    [config] = hub.downloads(f"{COMMIT}/config.json")
    assert hub.requests.index(config) < hub.requests.index(weights), "it is looked at first"
    assert pulled.bytes == sum(map(len, expected.values()))
    assert resolve_model(FOLDER_REPO) == pulled.path
    assert [(model.name, model.path) for model in pulled_models()] == [(FOLDER_REPO, pulled.path)]


def test_everything_is_taken_from_the_commit_that_was_listed(hub):

    pull(f"{REPO}:Q8_0", endpoint=hub.url)
    assert hub.requests[-1].path == f"/{REPO}/resolve/{COMMIT}/Qwen3-Tiny-Q8_0.gguf"


def test_f16_is_not_bf16(hub):
    assert pull(f"{REPO}:F16", endpoint=hub.url).path.name == "Qwen3-Tiny-F16.gguf"


# --- interrupted, and resumed


def test_a_connection_that_breaks_half_way_is_taken_up_where_it_broke(hub):
    hub.drop_after, hub.drops = len(Q8) // 2, 1
    pulled = pull(f"{REPO}:Q8_0", endpoint=hub.url)

    first, second = hub.downloads("Qwen3-Tiny-Q8_0.gguf")
    assert pulled.path.read_bytes() == Q8
    assert first.range_start is None
    assert second.range_start == len(Q8) // 2


def test_after_an_interruption_the_next_pull_goes_on(hub, cache):
    def interrupt(name, done, total):
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(f"{REPO}:Q8_0", endpoint=hub.url, on_progress=interrupt)
    (partial,) = (cache / REPO).glob("*.partial")
    kept = partial.stat().st_size
    assert 100_000 < kept < len(Q8)
    assert find_pulled(f"{REPO}:Q8_0") is None and pulled_models() == ()

    calls = []
    pulled = pull(f"{REPO}:Q8_0", endpoint=hub.url, on_progress=lambda *call: calls.append(call))
    assert pulled.path.read_bytes() == Q8
    assert hub.downloads("Qwen3-Tiny-Q8_0.gguf")[-1].range_start == kept
    assert calls[0][1] == kept
    assert not list((cache / REPO).glob("*.partial"))


def test_a_server_that_breaks_off_for_good_is_one_line_and_the_part_is_kept(hub, cache):
    hub.drop_after, hub.drops = 0, 1000
    assert "cannot reach" in refused(hub, f"{REPO}:Q8_0")
    assert list((cache / REPO).glob("*.partial"))


def test_a_server_without_ranges_sends_the_whole_file_again(hub, cache):
    hub.ranges = False
    hub.drop_after, hub.drops = 100_000, 1

    assert pull(f"{REPO}:Q8_0", endpoint=hub.url).path.read_bytes() == Q8


def test_a_part_of_another_version_is_not_continued_and_is_cleared_away(hub, cache):
    (cache / REPO).mkdir(parents=True)
    old = cache / REPO / ".Qwen3-Tiny-Q8_0.gguf.0000000000000000.partial"
    old.write_bytes(b"of another file")

    assert pull(f"{REPO}:Q8_0", endpoint=hub.url).path.read_bytes() == Q8
    assert not old.exists()


# --- damaged


@pytest.mark.parametrize("name", [f"{REPO}:Q8_0", FOLDER_REPO])
def test_a_wrong_checksum_is_refused_and_nothing_is_left(hub, cache, name):
    hub.stated_sha256 = "ab" * 32

    message = refused(hub, name)
    assert "damaged on the way: its checksum is" in message and "abababab" in message
    assert not list(cache.rglob("*.gguf")) and not list(cache.rglob("*.safetensors"))
    assert not [part for part in cache.rglob("*.partial") if "config.json" not in part.name], "which was whole"
    assert find_pulled(name) is None


def test_a_small_file_is_held_against_its_git_hash(hub, cache, monkeypatch):
    monkeypatch.setattr("tests.model.fake_hub.git_blob", lambda content: "0" * 40)
    assert "model.safetensors.index.json: damaged on the way" in refused(hub, FOLDER_REPO)
    assert find_pulled(FOLDER_REPO) is None


def test_a_damaged_part_is_noticed_at_the_end_and_the_next_pull_is_clean(hub, cache):
    (cache / REPO).mkdir(parents=True)
    digest = hashlib.sha256(Q8).hexdigest()[:16]
    (cache / REPO / f".Qwen3-Tiny-Q8_0.gguf.{digest}.partial").write_bytes(b"garbage")

    assert "damaged" in refused(hub, f"{REPO}:Q8_0")
    assert pull(f"{REPO}:Q8_0", endpoint=hub.url).path.read_bytes() == Q8


# --- refused


def test_without_a_quantization_the_choices_are_listed(hub):
    message = refused(hub, REPO, UsageError)
    assert "fits 4 files; name one: " in message
    assert f"{REPO}:Q8_0" in message and f"{REPO}:Q4_K_M" in message
    assert "mmproj" not in message and "Q8_K" not in message


def test_a_quantization_that_is_not_there_lists_those_that_are(hub):
    assert refused(hub, f"{REPO}:Q2_K", UsageError) == f"{REPO} has no Q2_K; it has BF16, F16, Q4_K_M, Q8_0"


def test_a_type_that_forge_does_not_compute_with_is_refused_by_name(hub, cache):
    for label in ("IQ2_M", "UD-IQ1_S", "TQ1_0", "MXFP4_MOE"):
        hub.repos[REPO][f"Qwen3-Tiny-{label}.gguf"] = b"bits" * 1000
    message = refused(hub, f"{REPO}:IQ2_M", UsageError)
    assert message.startswith(
        "forge does not compute with IQ2_M, as in Qwen3-Tiny-IQ2_M.gguf; it has BF16, F16, Q4_K_M"
    )
    for label in ("UD-IQ1_S", "TQ1_0", "MXFP4_MOE"):
        assert f"forge does not compute with {label}" in refused(hub, f"{REPO}:{label}", UsageError)
        assert label not in refused(hub, REPO, UsageError)
    assert not any(request.method == "GET" and "resolve" in request.path for request in hub.requests)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_type": "IQ2_S"}, "forge does not compute with its IQ2_S tensors"),
        ({"metadata": {"general.architecture": "llama"}}, "it holds 'llama'; forge runs 'qwen3' and 'qwen3moe'"),
    ],
)
@pytest.mark.parametrize("begun", [0, 40_000])
def test_a_file_is_refused_by_its_header_before_its_data_has_come(hub, cache, tmp_path, options, words, begun):
    content = gguf_beginning(tmp_path, **options) + bytes(8 << 20)
    hub.repos[REPO]["Qwen3-Tiny-Q3_K_M.gguf"] = content
    partial = cache / REPO / f".Qwen3-Tiny-Q3_K_M.gguf.{hashlib.sha256(content).hexdigest()[:16]}.partial"
    if begun:
        partial.parent.mkdir(parents=True)
        partial.write_bytes(content[:begun])
    seen = []
    with pytest.raises(PullError) as caught:
        pull(f"{REPO}:Q3_K_M", endpoint=hub.url, on_progress=lambda name, here, of: seen.append(here))
    assert str(caught.value) == f"Qwen3-Tiny-Q3_K_M.gguf: {words}; the download was ended after its header"
    assert max(seen, default=0) < 1 << 20 and not list(cache.rglob("*.gguf*"))


def test_a_folder_of_another_kind_is_refused_by_its_config_before_its_weights_come(hub, cache):
    hub.repos[FOLDER_REPO]["config.json"] = b'{"model_type": "llama", "why": "' + b"x" * 100 + b'"}'
    message = refused(hub, FOLDER_REPO)
    assert (
        message
        == f"{FOLDER_REPO}: config.json: model_type: this folder holds 'llama'; forge runs 'qwen3' and 'qwen3_moe'; "
        + ("nothing was downloaded")
    )
    assert not hub.downloads("model-00001-of-00002.safetensors") and not list(cache.rglob("*.partial"))


def test_a_repository_without_a_model_is_refused(hub):
    hub.repos["a/b"] = {"README.md": b"x", "pytorch_model.bin": b"x"}
    assert "holds nothing that forge can run" in refused(hub, "a/b", UsageError)


def test_an_unknown_repository_is_one_line(hub):
    assert f"{hub.url} has no such model, or it is private" in refused(hub, "no/such:Q8_0")


def test_a_gated_repository_says_where_to_accept_its_terms(hub):
    hub.file_status = (403, "GatedRepo")
    assert f"is gated: accept its terms at {hub.url}/{REPO}, then set HF_TOKEN" in refused(hub, f"{REPO}:Q8_0")


@pytest.mark.parametrize(
    ("status", "words"), [(403, "refused the token (403)"), (429, "fewer requests"), (500, "answered with status 500")]
)
def test_other_answers_are_one_line(hub, status, words):
    hub.status = (status, "")
    assert words in refused(hub, f"{REPO}:Q8_0")


def test_a_server_that_is_not_there_is_one_line():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hub = FakeHub(url=f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert f"cannot reach {hub.url}" in refused(hub, f"{REPO}:Q8_0")


def test_offline_mode_is_named(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    close_session = (
        getattr(huggingface_hub.utils, "reset_sessions", None) or huggingface_hub.close_session
    )  # by release
    close_session()  # the next one is made for the mode
    try:
        assert "HF_HUB_OFFLINE is set" in refused(hub, f"{REPO}:Q8_0")
    finally:
        close_session()
    assert not hub.requests


def test_a_disk_without_room_is_refused_before_the_download(hub, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda path: usage)

    assert "are still to come, and the disk has 0.0 GB left" in refused(hub, f"{REPO}:Q8_0")
    assert not hub.downloads("Qwen3-Tiny-Q8_0.gguf")


def test_a_disk_that_fills_up_is_one_line_and_the_part_is_kept(hub, cache, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pull_module._WatchedFile, "write", full)
    assert "the disk is full" in refused(hub, f"{REPO}:Q8_0")
    assert list((cache / REPO).glob("*.partial"))


def test_two_pulls_of_one_model_do_not_write_into_each_other(hub, cache):
    from filelock import FileLock

    (cache / REPO).mkdir(parents=True)
    with FileLock(cache / REPO / ".pull.lock"):
        assert "is being pulled by another process" in refused(hub, f"{REPO}:Q8_0")


def test_without_the_library_the_error_says_how_to_install_it(hub, monkeypatch):
    monkeypatch.setattr(pull_module, "find_spec", lambda name: None)
    assert "pip install huggingface_hub" in refused(hub, f"{REPO}:Q8_0")


@pytest.mark.parametrize(
    "name", ["..\\..\\x-Q8_0.gguf", ".hidden-Q8_0.gguf", "a/../../-Q8_0.gguf", "\x1b[31m-Q8_0.gguf"]
)
def test_a_hostile_file_name_reaches_no_other_folder(hub, cache, tmp_path, name):
    hub.repos["a/b"] = {name: b"x" * 200}
    try:
        path = pull("a/b:Q8_0", endpoint=hub.url).path
    except ForgeError as error:
        assert str(error).isprintable()
    else:
        assert path.parent == cache / "a" / "b"
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert all(file.is_relative_to(cache / "a" / "b") for file in written)


# --- the environment


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with running(FakeHub(repos=hub.repos)) as cdn:
        hub.cdn = cdn.url.replace("127.0.0.1", "localhost")
        assert pull(f"{REPO}:Q8_0", endpoint=hub.url).path.read_bytes() == Q8

    assert {request.headers.get("authorization") for request in hub.requests} == {"Bearer hf_secret"}
    assert cdn.requests and all("authorization" not in request.headers for request in cdn.requests)


def test_hf_endpoint_and_hf_token_are_honoured(hub, tmp_path):
    code = f"from forge.model.pull import pull; print(pull({REPO + ':Q8_0'!r}).path)"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_other",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert Path(done.stdout.strip()).read_bytes() == Q8
    assert done.stderr == ""
    assert {request.headers.get("authorization") for request in hub.requests} == {"Bearer hf_other"}


def test_a_relative_cache_home_is_ignored_as_its_specification_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert pulled_module.pulled_folder() == Path.home() / ".cache" / "forge" / "models"


# --- names of what was pulled


def test_a_name_that_fits_several_pulled_files_lists_them(hub):
    for quant in ("Q8_0", "Q4_K_M"):
        pull(f"{REPO}:{quant}", endpoint=hub.url)

    with pytest.raises(UsageError, match=r"fits 2 pulled files; give one of .*Q4_K_M.*Q8_0"):
        find_pulled(REPO)
    assert [model.name for model in pulled_models()] == [f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"]


def test_a_name_that_was_not_pulled_says_how_to():
    with pytest.raises(UsageError, match=r"`forge models pull a/b:Q8_0` downloads it"):
        resolve_model("a/b:Q8_0")


def test_a_path_that_exists_goes_before_a_pulled_name(hub, tmp_path, monkeypatch):
    pull(FOLDER_REPO, endpoint=hub.url)
    monkeypatch.chdir(tmp_path)
    own = tmp_path / FOLDER_REPO
    own.mkdir(parents=True)
    (own / "config.json").write_text(json.dumps({}))

    assert resolve_model(FOLDER_REPO) == Path(FOLDER_REPO)
