"""The CPU backend: see `backend.py` for the whole, `kernels.py` and `tiles.py` for where the time goes."""
