"""Stop a run on SIGINT or SIGTERM at a moment at which its state can be saved."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from typing_extensions import Self

# A wrapper may pass on a Ctrl-C that the terminal has sent to the run, too.
_SAME_PRESS = 1.0  # seconds


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM has stopped a run. The message says what is saved and how to go on.

    Attributes: signum is the signal.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


class Interrupts:
    """A context in which SIGINT and SIGTERM raise KeyboardInterrupt, but not within `held()`.

    Inside `held()` the exception waits for the next `check()` or the end of the block, because one
    that comes at any place may leave a lock locked or a step half done. A second Ctrl-C raises at
    once; a second SIGTERM does nothing. Signals that the caller handles or ignores are left alone,
    and so are all in a thread that is not the main thread.

    Attributes:
        signum: the first signal that came, or None.
        verbose: whether to say on stderr that the run will stop soon.
    """

    def __init__(self, verbose: bool = False) -> None:
        self.signum: int | None = None
        self.verbose = verbose
        self._since = 0.0
        self._holding = False
        self._old: dict[int, Any] = {}
        self._report: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum, default in (
                (signal.SIGINT, signal.default_int_handler),
                (signal.SIGTERM, signal.SIG_DFL),
            ):
                if signal.getsignal(signum) == default:
                    self._old[signum] = signal.signal(signum, self._handle)
        self._report, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        sys.unraisablehook = self._report

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let a signal wait for `check()` or the end of the block."""
        self.check()
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come, even if its exception was swallowed."""
        if self.signum is not None:
            raise KeyboardInterrupt

    def _unraisable(self, dropped: Any) -> None:
        """Say nothing of a KeyboardInterrupt that a callback dropped: `check()` raises it again."""
        if self.signum is None or not issubclass(dropped.exc_type, KeyboardInterrupt):
            self._report(dropped)

    def _handle(self, signum: int, _: object) -> None:
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
            if not self._holding:
                raise KeyboardInterrupt
            if self.verbose:
                # print() may be what the signal has interrupted.
                os.write(2, b"\nligermodels: stopping soon; Ctrl-C stops at once\n")
        elif signum == signal.SIGINT and time.monotonic() - self._since > _SAME_PRESS:
            raise KeyboardInterrupt
