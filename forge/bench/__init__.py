"""The machinery of `forge bench`: each figure is a ratio against a named peer or baseline of the same run.

`process.py` runs programs in turns, each in a process of its own, whose side is `worker.py`; `*_worker.py` are the
programs. The benchmarks are in `forge.experiments.bench`, a file each (`forge.cli.bench` says how to add one). Nothing
here asserts a time; RESULTS.md holds what was measured, and on what.
"""
