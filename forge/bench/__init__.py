"""Benchmarks: each figure a ratio against a named peer or baseline that was measured in the same run.

`cpu.py` measures forge beside llama.cpp and transformers, `quality.py` measures what quantization and rounding cost in
accuracy. Every contender runs in a process of its own (`worker.py` is its side of the conversation, `contender.py`
ours). Nothing here asserts a time, prints or draws; RESULTS.md holds what was measured, and on what.
"""
