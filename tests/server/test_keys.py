"""Which keys open the server."""

import pytest

from forge.errors import UsageError
from forge.server.middleware import Keys


def test_keys_come_from_the_option_and_the_file_and_some_have_names(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  sk-one  \nalice sk-two\n")
    keys = Keys("sk-zero", str(file))
    assert keys.are_needed and all(map(keys.opens, (b"sk-zero", b"sk-one", b"sk-two")))
    assert not any(map(keys.opens, (b"", b"alice", b"# ours", b"sk-", b"sk-twoo")))
    assert [keys.name_of(key) for key in (b"sk-zero", b"sk-one", b"sk-two")] == [None, None, "alice"]


def test_without_keys_none_are_needed():
    assert not Keys().are_needed


@pytest.mark.parametrize("text, words", [("", "has no keys"), ("# none\n", "has no keys"), ("a\nb c d\n", "line 2")])
def test_a_file_of_keys_that_makes_no_sense_is_one_line_without_a_key_in_it(tmp_path, text, words):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UsageError, match=words) as refused:
        Keys(file=str(file))
    assert "b c d" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused_and_one_that_goes_keeps_the_keys(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        Keys(file=str(tmp_path / "none"))
    file = tmp_path / "keys"
    file.write_text("sk-one\n")
    keys = Keys(file=str(file))
    file.unlink()
    with pytest.raises(UsageError):
        keys.load()
    assert keys.opens(b"sk-one")
