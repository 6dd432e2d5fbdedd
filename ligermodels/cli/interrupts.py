"""End the process at once on Ctrl-C while it only imports modules.

A KeyboardInterrupt inside an import may end in a traceback, become an ImportError that somebody
catches, or be ignored by the import system. While nothing has been started that could be lost,
it is right to leave without one.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

EXIT_CODE = 130  # that of a program which SIGINT has ended


@contextlib.contextmanager
def quit_on_interrupt() -> Iterator[None]:
    """Say that the program was interrupted and exit, if SIGINT comes within the block.

    A handler that somebody else installed is left alone, and so is the signal in other threads.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _quit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _quit(*_: Any) -> None:
    # Neither print nor sys.exit: the signal may have interrupted a print or an import.
    os.write(2, b"ligermodels: interrupted\n")
    os._exit(EXIT_CODE)
