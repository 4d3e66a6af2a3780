"""The Triton kernels, one concept per file.

They compute in float32 and keep activations in the backend's dtype. Every size is masked, so any model fits; block
sizes are powers of two because Triton's are. What a kernel assumes of its arguments is in its docstring; `launches.py`
calls it and chooses its tile. A kernel has up to 32 arguments because Triton takes arrays and numbers one by one, and
compiles a kernel anew for each set of constants (in capitals): a structure could not say which of its parts are those.

With PDL (programmatic dependent launch) a kernel may start while the one before it still runs. Each waits
(`wait_for_previous`) before it touches anything that an earlier kernel wrote; only weights are read before that. Since
every program of every kernel waits, a kernel also finds everything finished that ran before the one before it. It lets
the next kernel start only when it has waited: so one kernel computes while one waits. Started earlier, up to seven
kernels waited on the device and took the room of the one that computed: on an H200 a decode of 4 rows of Qwen3-0.6B
took 3.3 ms instead of 1.7.
"""
