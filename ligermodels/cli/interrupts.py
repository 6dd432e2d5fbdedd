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

EXIT_CODE = 130  # that of a program which SIGINT has ended


_leaving = False


def _quit(*_: object) -> None:
    global _leaving
    if _leaving:  # A second signal came before the process ended.
        return
    try:
        sys.stdout.flush()
    except (OSError, RuntimeError, ValueError):  # The signal may have interrupted a print.
        pass
    _leaving = True
    # Neither print nor sys.exit: the signal may have interrupted an import.
    if os.isatty(2):
        os.write(2, b"\r\x1b[2K\x1b[?25h")  # Remove the progress bar, which has hidden the cursor.
    os.write(2, b"ligermodels: interrupted\n")
    os._exit(EXIT_CODE)


class _Exchange:
    """A context in which a handler of SIGINT replaces another; in other threads it does nothing."""

    old: object
    new: object

    def __enter__(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.replaced = main and signal.getsignal(signal.SIGINT) == self.old
        if self.replaced:
            signal.signal(signal.SIGINT, self.new)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        if self.replaced:
            signal.signal(signal.SIGINT, self.old)  # type: ignore[arg-type]


class quit_on_interrupt(_Exchange):
    """A context in which SIGINT ends the process with one line on stderr.

    A handler that somebody else installed is left alone, and so is the signal in other threads.
    """

    old, new = signal.default_int_handler, staticmethod(_quit)


class raise_on_interrupt(_Exchange):
    """A context within the other one in which SIGINT raises KeyboardInterrupt, as in Python."""

    old, new = staticmethod(_quit), signal.default_int_handler
