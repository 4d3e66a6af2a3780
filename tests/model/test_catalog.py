"""Names and paths of models."""

import hashlib

import pytest

from forge.errors import UsageError
from forge.model import catalog
from forge.model.catalog import BUNDLED_MODELS, DEFAULT_MODEL, models_folder, resolve_model, sha256


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A models folder in which every bundled model is present."""
    monkeypatch.setattr(catalog, "models_folder", lambda: tmp_path)
    for model in BUNDLED_MODELS:
        (tmp_path / model.file_name).write_bytes(b"x" * 10)
    return tmp_path


def test_a_name_and_each_of_its_aliases_mean_the_same_file(folder):
    for model in BUNDLED_MODELS:
        for name in (model.name, *model.aliases):
            assert resolve_model(name) == folder / model.file_name


def test_the_default_model_is_bundled(folder):
    assert resolve_model(DEFAULT_MODEL).parent == folder


def test_no_two_models_share_a_name():
    names = [name for model in BUNDLED_MODELS for name in (model.name, *model.aliases)]

    assert len(names) == len(set(names))


def test_a_path_is_taken_as_it_is(tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"x")

    assert resolve_model(path) == resolve_model(str(path)) == path


def test_a_bundled_model_that_is_missing_says_how_to_get_it(folder):
    (folder / BUNDLED_MODELS[0].file_name).unlink()

    with pytest.raises(UsageError, match="is missing; `make models`"):
        resolve_model(BUNDLED_MODELS[0].name)
    assert not BUNDLED_MODELS[0].present
    assert BUNDLED_MODELS[0].bytes == 0


def test_a_misspelt_name_is_answered_with_the_nearest(folder):
    with pytest.raises(UsageError, match=r"no such file.*did you mean tales\?") as raised:
        resolve_model("tails")
    assert raised.value.exit_code == 2


def test_a_file_that_is_not_there_lists_the_bundled_models():
    with pytest.raises(UsageError, match=r"no such file\. Bundled models: tales,") as raised:
        resolve_model("/nowhere/zzzz.gguf")
    assert "did you mean" not in str(raised.value)


def test_an_empty_name_is_no_folder():
    with pytest.raises(UsageError, match="name is empty"):
        resolve_model("")


def test_a_folder_is_refused_with_what_to_give_instead(tmp_path):
    with pytest.raises(UsageError, match=r"is a folder; give a \.gguf file in it"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("text", ["x" * 5000, "~nosuchuser/m.gguf", "a\0b"], ids=["too long", "no such user", "NUL"])
def test_what_cannot_be_a_path_is_one_line_too(text):
    with pytest.raises(UsageError) as raised:
        resolve_model(text)
    assert "\n" not in str(raised.value)


def test_the_models_folder_is_the_checkout_s():
    assert models_folder().name == "models"


def test_sha256_is_the_digest_of_the_bytes(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"abc")

    assert sha256(path) == hashlib.sha256(b"abc").hexdigest()
