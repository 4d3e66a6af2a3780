"""Puts the mutant that is tried in the place of its code, in processes that a test starts."""

import os

from tests.mutants import MUTANT, mutants_of, put_in_place

if MUTANT in os.environ:
    module, number = os.environ[MUTANT].split()
    put_in_place(mutants_of(module)[int(number)])
