"""Waiting for conditions: a test never waits for a length of time, which a busy machine may need and exceed."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 120
"""Seconds after which what hangs is given up. Nothing that works comes near it, on a machine however busy."""


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    """Whether `condition` comes to hold."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def eventually(condition: Callable[[], Any]) -> None:
    """Return once `condition` holds. Raises `TimeoutError`."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)
