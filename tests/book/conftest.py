import pytest

from tests.cli.conftest import forge, model, small  # noqa: F401 (fixtures)


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    """Progress is kept where no reader's own is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"
