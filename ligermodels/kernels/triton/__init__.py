"""The Triton kernels and their launchers: one module an op, found by its name, and shared parts.

A launcher has the name and the signature of its twin in `ligermodels.kernels.reference`. Importing
this package imports triton; `kernels.dispatch.select` does it on first use.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
