"""The effect of Ctrl-C on a command.

A KeyboardInterrupt may end in a traceback, become another error that somebody catches, or leave a
lock locked, so that a thread never ends. Where nothing has to be undone, it is right to
leave without one: during the imports, and while a command downloads, loads and computes. This
module imports little, because until then Ctrl-C is Python's.
"""

import os
import signal
import sys

EXIT_CODE = 130  # that of a program which SIGINT has ended


class quit_on_interrupt:
    """A context in which SIGINT ends the process with one line on stderr.

    A handler that somebody else installed is left alone, and so is the signal in other threads.
    """

    def __enter__(self) -> None:
        self._replaced = _exchange(signal.default_int_handler, _quit)

    def __exit__(self, *_: object) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class raise_on_interrupt:
    """A context within the other one in which SIGINT raises KeyboardInterrupt, as in Python."""

    def __enter__(self) -> None:
        self._replaced = _exchange(_quit, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, _quit)


def _exchange(old: object, new: object) -> bool:
    """Replace the handler of SIGINT if it is `old`; return whether it was replaced."""
    if signal.getsignal(signal.SIGINT) != old:
        return False
    try:
        signal.signal(signal.SIGINT, new)  # type: ignore[arg-type]
    except ValueError:  # This is not the main thread.
        return False
    return True


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
    os.write(2, b"ligermodels: interrupted\n")
    os._exit(EXIT_CODE)
