"""The Triton launchers, under the same names and signatures as in `kernels.reference`.

Importing this package imports triton; `kernels.backend.select` does it on first use.
"""

from ligermodels.kernels.triton.cross_entropy import cross_entropy_rows
from ligermodels.kernels.triton.glu import glu_backward, glu_forward
from ligermodels.kernels.triton.layer_norm import layer_norm_backward, layer_norm_forward
from ligermodels.kernels.triton.mean_loss import mean_loss
from ligermodels.kernels.triton.qk_norm_rope import qk_norm_rope_backward, qk_norm_rope_forward
from ligermodels.kernels.triton.rms_norm import rms_norm_backward, rms_norm_forward
from ligermodels.kernels.triton.rope import rope_backward, rope_forward
from ligermodels.kernels.triton.scaled import scaled

__all__ = [
    "cross_entropy_rows",
    "glu_backward",
    "glu_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "mean_loss",
    "qk_norm_rope_backward",
    "qk_norm_rope_forward",
    "rms_norm_backward",
    "rms_norm_forward",
    "rope_backward",
    "rope_forward",
    "scaled",
]
