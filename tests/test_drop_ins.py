"""Modules that are found by their files."""

from forge.drop_ins import first_lines


def test_a_file_and_a_folder_are_found_and_none_is_imported(tmp_path):
    (tmp_path / "one.py").write_text('"""What one does."""\nraise ImportError\n')
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "__init__.py").write_text('"""What two does:\n\nmore."""\n')
    assert first_lines([str(tmp_path)]) == {"one": "What one does.", "two": "What two does:"}
