"""The Triton kernels and their launchers: a module for each op, with its name, and shared parts.

A launcher has the name and the signature of a function in `ligermodels.kernels.reference`, which
defines its result. Importing this package imports triton; `kernels.dispatch.select` does it on
first use.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
