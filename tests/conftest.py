"""Which tests run, and how far they look.

Tests marked `slow` run with FORGE_ALL_TESTS (`make test-all`), and are deselected without it; the summary counts them.
They are the long cases of what a quicker test checks, servers and terminals of their own, other instruction sets, and
whole chapters. Hypothesis: the default profile is small and deterministic; FORGE_HYPOTHESIS_PROFILE=fuzz looks far, at
random; "mutants" makes no failing example simpler.
"""

import os
import signal

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "default",
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fuzz", settings.get_profile("default"), max_examples=20_000, derandomize=False)
settings.register_profile("mutants", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("FORGE_HYPOTHESIS_PROFILE", "default"))

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts what it runs in the background deaf to Ctrl-C, and children inherit that. Tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


NUM_SLOW = pytest.StashKey[int]()
"""How many tests were deselected because they are slow."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("FORGE_ALL_TESTS"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    config.stash[NUM_SLOW] = len(slow)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_slow"] = session.config.stash.get(NUM_SLOW, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Every worker of pytest-xdist collects all tests, so that one of them tells how many are left out."""
    node.config.stash[NUM_SLOW] = getattr(node, "workeroutput", {}).get("num_slow", 0)


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter", config: pytest.Config) -> None:
    if number := config.stash.get(NUM_SLOW, 0):
        terminalreporter.write_line(f"{number} slow tests were left out: make test-all runs them (FORGE_ALL_TESTS=1)")
