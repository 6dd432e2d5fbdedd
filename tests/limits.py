"""How long a test waits for other processes.

The limit ends a test that hangs. No test depends on it: it is far above what a process needs, also
where many others share its core.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 1200


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until the condition is true, or fail."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.05)
