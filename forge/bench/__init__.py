"""The benchmarks of `forge bench`: each figure is a ratio against a named peer or baseline of the same run.

A file whose docstring begins with `forge bench NAME` is a benchmark (`forge.cli.bench` says how to add one); `kit.py`
has what they share. `process.py` runs programs in turns, each in a process of its own, whose side is `worker.py`;
`*_worker.py` are the programs. Nothing here asserts a time; RESULTS.md holds what was measured, and on what.
"""
