"""Every op in plain PyTorch: it defines the op, serves CPU tensors and is the tests' oracle.

One module an op, found by its name. An op has a forward, differentiable by autograd, and a
written-out backward, each with the signature of its Triton twin in `ligermodels.kernels.triton`.
Arithmetic is float32, or float64 where the input is.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
