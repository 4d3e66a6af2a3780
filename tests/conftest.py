"""Hypothesis profiles: the default is small and deterministic; FORGE_HYPOTHESIS_PROFILE=fuzz looks far, at random."""

import os

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
