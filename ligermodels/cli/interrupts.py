"""End the process at once on Ctrl-C while it only imports modules.

A KeyboardInterrupt inside an import may end in a traceback, become an ImportError that somebody
catches, or be ignored by the import system. While nothing has been started that could be lost,
it is right to leave without one. This module imports little, because until then Ctrl-C is Python's.
"""

import os
import signal

EXIT_CODE = 130  # that of a program which SIGINT has ended


class quit_on_interrupt:
    """A context in which SIGINT ends the process with one line on stderr.

    A handler that somebody else installed is left alone, and so is the signal in other threads.
    """

    def __enter__(self) -> None:
        self.active = False
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, _quit)
            except ValueError:  # This is not the main thread.
                return
            self.active = True

    def __exit__(self, *_: object) -> None:
        if self.active:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _quit(*_: object) -> None:
    # Neither print nor sys.exit: the signal may have interrupted a print or an import.
    os.write(2, b"ligermodels: interrupted\n")
    os._exit(EXIT_CODE)
