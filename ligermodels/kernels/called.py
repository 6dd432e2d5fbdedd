"""Errors under the name that the user called, of checks that several functions share."""

from types import TracebackType

import torch

SHARED = ("cross entropy: ", "loss head: ")
"""How shared checks begin their messages."""


class called:
    """Context in which an error of a shared check says `name: ...`, whoever else names it within.

    Left alone while compiling: torch.compile wraps the error in its own words anyway.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or torch.compiler.is_compiling():
            return
        message = getattr(error, "shared", str(error))
        for prefix in SHARED:
            if message.startswith(prefix):
                error.shared = message  # type: ignore[attr-defined]
                error.args = (f"{self.name}: {message.removeprefix(prefix)}",)
