"""`python -m forge.cli.build_engine FOLDER COMMAND …`: the process in which a reader's own engine runs a command."""

import sys
from pathlib import Path

from forge.cli.main import main
from forge.exercises.own_engine import run_command

if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    sys.exit(run_command(Path(folder), arguments, main))
