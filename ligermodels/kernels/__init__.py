"""The fused ops as functions. The first op on a GPU imports Triton; this package does not.

Backward gives first derivatives. Second derivatives raise an error, and `torch.func` is not
supported.
"""

from ligermodels.kernels.cross_entropy import cross_entropy
from ligermodels.kernels.divergence import linear_divergence
from ligermodels.kernels.expert_mlp import expert_mlp
from ligermodels.kernels.fused_linear import gate_linear, glu_linear, norm_linear, norm_qkv_rope
from ligermodels.kernels.gated_delta import gated_delta
from ligermodels.kernels.gated_delta_layer import gated_delta_layer
from ligermodels.kernels.glu import glu
from ligermodels.kernels.linear_cross_entropy.functions import (
    linear_cross_entropy,
    linear_log_probs,
)
from ligermodels.kernels.linear_cross_entropy.groups import linear_group_loss
from ligermodels.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ligermodels.kernels.output_gate import output_gate
from ligermodels.kernels.qk_norm_rope import qk_norm_rope, split_gated_qkv
from ligermodels.kernels.rope import rope, split_qkv
from ligermodels.kernels.routing import routing

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "expert_mlp",
    "gate_linear",
    "gated_delta",
    "gated_delta_layer",
    "glu",
    "glu_linear",
    "layer_norm",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_group_loss",
    "linear_log_probs",
    "norm_linear",
    "norm_qkv_rope",
    "output_gate",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "routing",
    "split_gated_qkv",
    "split_qkv",
]
