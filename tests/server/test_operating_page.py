"""The files of chapters/reference/operating.md: what can be checked of them where neither systemd nor Docker runs."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.cli.conftest import ROOT

PAGE = (ROOT / "chapters" / "reference" / "operating.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```(ini|dockerfile|nginx|json)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
UNIT, DOCKERFILE, LINE = BLOCKS["ini"], BLOCKS["dockerfile"], json.loads(BLOCKS["json"])


def lines_that_start() -> list[list[str]]:
    """What the unit, the Dockerfile and the page start, without the name of the program."""
    (started,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    entry, command = (
        json.loads(re.search(rf"^{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)[1]) for name in ("ENTRYPOINT", "CMD")
    )
    (shown,) = re.findall(r"^(forge serve [^#\n]*)", PAGE, re.MULTILINE)
    return [shlex.split(started)[1:], [*entry, *command][1:], shlex.split(shown)[1:]]


@pytest.mark.parametrize("line", lines_that_start(), ids=["unit", "Dockerfile", "page"])
def test_what_the_files_start_is_a_line_that_forge_takes(forge, line):
    model = line.index("--model") + 1
    found = forge(*line[:model], "no/such.gguf", *line[model + 1 :], "--port", "0")
    assert found.status == 2 and "forge: no/such.gguf" in found.err


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / "forge.service"
    unit.write_text(UNIT.replace("/opt/forge/.venv/bin/forge", sys.executable))
    found = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert found.returncode == 0 and not found.stderr.strip()


def test_the_stop_time_of_the_unit_and_of_docker_is_above_the_grace_time():
    grace = int(re.search(r"--grace (\d+)", UNIT)[1])
    assert int(re.search(r"TimeoutStopSec=(\d+)", UNIT)[1]) > grace + 2
    assert int(re.search(r"--stop-timeout (\d+)", PAGE)[1]) > 10 + 2


def test_the_line_of_the_access_log_has_the_fields_that_a_line_has():
    from forge.server.exchange import Exchange

    facts = Exchange("abc", "POST", "127.0.0.1", first_byte=1.0, num_prompt_tokens=1, key="alice").facts()
    assert set(facts) <= set(LINE)
