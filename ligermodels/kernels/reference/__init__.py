"""The ops in plain PyTorch. These modules define the ops and run on CPU tensors.

Each op has a module with its name. The module has a forward, which autograd can differentiate, and
an explicit backward. Both have the signatures of the launchers in `ligermodels.kernels.triton`.
They compute in float32, or in float64 for float64 inputs. The tests compare the kernels with them.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
