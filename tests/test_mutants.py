"""`make mutants`: what it changes, and what it is told to leave out."""

import ast
import re
import tomllib

from tests import mutants
from tests.mutants import ROOT, modules, mutants_of

EQUIVALENT = tomllib.loads((ROOT / "tests/equivalent_mutants.toml").read_text())


def test_what_is_listed_as_equivalent_is_a_mutant():
    for module, reasons in EQUIVALENT.items():
        text = mutants.path_of(module).read_text()
        numbers = {line.strip() for line in text.splitlines() if re.match(r"[A-Z_, ]+ = .*\d|    \"\w+\": \d", line)}
        assert reasons.keys() <= {mutant.title for mutant in mutants_of(module)} | numbers
        assert all(reasons.values()), "with the reason"


def test_every_module_has_tests_and_mutants_that_are_other_code():
    assert len(modules()) > 50
    for module in ("forge.cache.block_pool", "forge.engine.policies"):
        text = mutants.path_of(module).read_text()
        for mutant in mutants_of(module)[::5]:
            changed = mutant.change.made_in(text)
            compile(changed, module, "exec")
            assert ast.unparse(changed) != ast.unparse(ast.parse(text)), mutant.title
    assert all(mutants.tests_of(module) for module in modules())
