"""Hypothesis profiles: the default is small and deterministic; FORGE_HYPOTHESIS_PROFILE=fuzz looks far, at random."""

import os
import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fuzz", settings.get_profile("default"), max_examples=20_000, derandomize=False)
settings.load_profile(os.environ.get("FORGE_HYPOTHESIS_PROFILE", "default"))

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts what it runs in the background deaf to Ctrl-C, and children inherit that. Tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
