"""Code that uses other libraries, such as transformers. No other room imports them."""

import sys
from importlib.util import find_spec

# Library -> the extra of this package that installs it.
EXTRAS = {
    "datasets": "trainers",
    "peft": "trainers",
    "transformers": "trainers",
    "trl": "trainers",
    "lm_eval": "tools",
}


def require(*libraries: str) -> None:
    """Raise unless the libraries that a module imports are installed.

    Raises:
        ModuleNotFoundError: one is not; the message says how to install it.
    """
    for name in libraries:
        if (sys.modules[name] if name in sys.modules else find_spec(name)) is None:
            raise ModuleNotFoundError(
                f"{name} is not installed, and this part of ligermodels needs it: "
                f'pip install "ligermodels[{EXTRAS[name]}]"',
                name=name,
            )
