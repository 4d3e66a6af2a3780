"""Benchmarks: each figure a ratio against a named peer or baseline that was measured in the same run.

Each file with a `bench_…` is a benchmark (`forge.cli.bench` says how to add one). `process.py` runs programs in turns,
each in a process of its own, whose side is `worker.py`; `*_worker.py` are the programs. `results.py` and `tables.py`
are what is reported. Nothing here asserts a time; RESULTS.md holds what was measured, and on what.
"""
