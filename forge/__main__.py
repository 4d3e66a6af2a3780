"""`python -m forge`."""

from forge.cli.main import run

if __name__ == "__main__":
    run()
