"""The Triton kernels, one concept per file.

They compute in float32 and keep activations in the backend's dtype. Every size is masked, so any model fits; block
sizes are powers of two because Triton's are. What a kernel assumes of its arguments is in its docstring; who calls it
with which tile is `../launches.py`'s business.

With PDL (programmatic dependent launch) a kernel may start while the one before it still runs. Each waits
(`wait_for_previous`) before it touches anything that an earlier kernel wrote; only weights are read before that. Since
every program of every kernel waits, a kernel also finds everything finished that ran before the one before it.
"""
