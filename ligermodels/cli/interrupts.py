"""The effect of Ctrl-C on a command.

A KeyboardInterrupt may end in a traceback, become another error that somebody catches, or leave a
lock locked, so that a thread never ends. Where nothing has to be undone, it is right to
leave without one: during the imports, and while a command downloads, loads and computes. This
module imports little, because until then Ctrl-C is Python's.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

EXIT_CODE = 130  # that of a program which SIGINT has ended


def _quit(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A second signal may come before the end.
    try:
        sys.stdout.flush()
    except (OSError, RuntimeError, ValueError):  # The signal may have interrupted a print.
        pass
    # Neither print nor sys.exit: the signal may have interrupted an import.
    os.write(2, b"ligermodels: interrupted\n")
    os._exit(EXIT_CODE)


@contextmanager
def _exchanged(old: Any, new: Any) -> Iterator[None]:
    """Let a handler of SIGINT take the place of another within the context.

    If there is a third one, it is left alone, and so is the signal in other threads.
    """
    main = threading.current_thread() is threading.main_thread()
    replaces = main and signal.getsignal(signal.SIGINT) == old
    if replaces:
        signal.signal(signal.SIGINT, new)
    try:
        yield
    finally:
        if replaces:
            signal.signal(signal.SIGINT, old)


# A context in which SIGINT ends the process with one line on stderr.
quit_on_interrupt = partial(_exchanged, signal.default_int_handler, _quit)
# A context within the other one in which SIGINT raises KeyboardInterrupt, as in Python.
raise_on_interrupt = partial(_exchanged, _quit, signal.default_int_handler)
