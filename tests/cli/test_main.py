"""The table of commands: what the list says is what the commands say, and a module is imported when it is named."""

import inspect
import re

import pytest

from forge.cli.main import PANELS, command_named, main
from tests.cli.test_imports import modules_after


@pytest.mark.parametrize(("name", "summary"), [pair for commands in PANELS.values() for pair in commands.items()])
def test_a_command_is_what_the_list_says(name, summary):
    command = command_named(name)
    assert command is not None and command.name == name and command.help
    assert " ".join(inspect.cleandoc(command.help).split("\n\n")[0].split()) == summary


def test_there_is_no_command_that_is_not_in_the_list():
    assert command_named("nothing") is None


def test_the_list_imports_no_command_and_a_command_no_other():
    listed = modules_after("from forge.cli.main import main; main(['--help'])")
    named = modules_after("from forge.cli.main import main; main(['generate', '--help'])")
    commands = {f"forge.cli.{name.replace('-', '_')}" for names in PANELS.values() for name in names}
    assert not listed & commands and not [name for name in listed if name.startswith("forge.experiments.")]
    assert not listed & {"forge.engine_args", "forge.model"}
    assert named & commands == {"forge.cli.generate"}


@pytest.mark.parametrize("name", [name for names in PANELS.values() for name in names])
def test_no_option_is_cut_short_at_80_columns(name, monkeypatch, capfd):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    assert main([name, "--help"]) == 0
    assert not re.findall(r"--[\w-]+…", capfd.readouterr().out)
