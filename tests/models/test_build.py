import json

import pytest

from forge.model.catalog import BUNDLED_MODELS
from models import build
from models.card import BEGIN, END, write_card
from models.network import Qwen3
from models.train import Phase, Schedule

from .conftest import TINY

FIGURES = {
    "tales-q8_0.gguf": {
        "parameters": 1000,
        "bytes": 2000,
        "held_out_loss": 0.4,
        "answers": {"yes_no": 0.95},
        "answers_of_two": {"yes_no": 0.96},
        "answers_held_out_phrasing": {"yes_no": 0.9},
        "answers_held_out_phrasing_of_two": {"yes_no": 0.92},
        "consistency": {"greedy": {"all": 0.98}},
        "sha256": "abc",
    },
    "tales-draft-q8_0.gguf": {
        "parameters": 100,
        "bytes": 200,
        "held_out_loss": 0.9,
        "agreement": {"rate": 0.9, "accepted": {"4": 0.88}, "sampled": 0.8},
        "cost": 0.04,
        "sha256": "def",
    },
}


def test_the_card_shows_old_beside_new_and_keeps_the_rest(tmp_path):
    card = tmp_path / "README.md"
    card.write_text(f"# Tales\n\n{BEGIN}\nold\n{END}\n\n## Limits\n")
    old = {"tales-q8_0.gguf": {**FIGURES["tales-q8_0.gguf"], "answers": {"yes_no": 0.55}}}
    write_card(card, FIGURES, old)
    text = card.read_text()
    assert "| answers right, yes_no | 55.0 % (96.0 %) | 95.0 % (96.0 %) |" in text
    assert "| accepted over proposed, K = 4 | 88.0 % |" in text
    assert "def  tales-draft-q8_0.gguf" in text
    assert text.startswith("# Tales\n")
    assert text.endswith("\n\n## Limits\n")
    write_card(card, FIGURES, old)
    assert card.read_text() == text


def test_the_card_and_the_log_are_those_of_the_bundled_files():
    card = (build.HERE / "README.md").read_text()
    files = sorted(build.HERE.glob("*.gguf"))
    assert {path.name for path in files} == {model.file_name for model in BUNDLED_MODELS}
    for path in files:
        assert f"{build.sha256(path)}  {path.name}" in card
    log = [json.loads(line) for line in (build.HERE / "training_log.jsonl").read_text().splitlines()]
    for name, schedule in (
        ("target", Schedule()),
        ("draft-copying", build.COPYING_SCHEDULE),
        ("draft", build.DRAFT_SCHEDULE),
        ("bad-draft", build.BAD_DRAFT_SCHEDULE),
    ):
        tokens = [line["tokens"] for line in log if line["model"] == name]
        assert tokens == sorted(tokens) and schedule.tokens - tokens[-1] < 200_000


def test_the_replaced_files_are_kept_once(tmp_path):
    (tmp_path / "tales-q8_0.gguf").write_text("old")
    folder = tmp_path / "build"
    build.keep_old_files(tmp_path, folder)
    (tmp_path / "tales-q8_0.gguf").write_text("new")
    assert (build.keep_old_files(tmp_path, folder) / "tales-q8_0.gguf").read_text() == "old"


def test_the_three_models_train_one_after_another_and_resume(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(build, "TARGET", TINY)
    monkeypatch.setattr(build, "DRAFT", TINY)
    monkeypatch.setattr(build, "BAD_DRAFT", TINY)
    short = Schedule((Phase(1024, 4, 32, text_weight=1.0),))
    monkeypatch.setattr(build, "COPYING_SCHEDULE", short)
    monkeypatch.setattr(build, "DRAFT_SCHEDULE", short)
    monkeypatch.setattr(build, "BAD_DRAFT_SCHEDULE", short)
    target = build.train_target(tokenizer, tmp_path, stop_at=1024)
    build.distil_draft(target, tokenizer, tmp_path)
    build.train_bad_draft(tokenizer, tmp_path)
    again = build.train_target(tokenizer, tmp_path, stop_at=1024)
    assert all(a.equal(b) for a, b in zip(target.parameters(), again.parameters(), strict=True))
    names = ["target", "draft-copying", "draft", "bad-draft"]
    for name in names:
        (tmp_path / name / "log.jsonl").write_text(json.dumps({"step": 20}) + "\n")
    build.gather_logs(tmp_path, tmp_path / "training_log.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == names
    assert isinstance(target, Qwen3)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--try", "0"], "--try: takes a number of tokens from 1, got 0"),
        (["--try", "many"], "--try: takes a number of tokens from 1, got many"),
        (["--output", __file__], "cannot be a folder"),
    ],
)
def test_a_wrong_argument_is_one_line_before_anything_is_trained(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr("sys.argv", ["build.py", "--build", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        build.main()
    assert ended.value.code == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_the_folder_for_the_files_is_made_before_training(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(build, "build", lambda folder, output, stop_at: begun.append(output.is_dir()))
    monkeypatch.setattr("sys.argv", ["build.py", "--build", str(tmp_path), "--output", str(tmp_path / "new" / "files")])
    build.main()
    assert begun == [True]
