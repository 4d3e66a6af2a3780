"""Whether a model, a cache, a proposer or a policy of your own keeps the promises that the engine relies on.

    from forge.testing import check_cache, check_model, check_proposer, check_victim_policy

Each raises AssertionError, saying what is violated. No test runner is needed; with pytest, `MODEL_CHECKS` has one
function for each promise of a model.
"""

from forge.testing.caches import check_cache
from forge.testing.engines import check_proposer, check_victim_policy
from forge.testing.models import MODEL_CHECKS, check_model

__all__ = ["MODEL_CHECKS", "check_cache", "check_model", "check_proposer", "check_victim_policy"]
