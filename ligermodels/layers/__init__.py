"""The layers of the models: plain nn.Modules that can be combined freely."""

from ligermodels.kernels.checks import ClampedSwiGLU
from ligermodels.layers.attention import Attention, AttentionContext
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.layers.block import DecoderBlock, LinearBlock, SandwichBlock
from ligermodels.layers.cross_attention import CrossAttention
from ligermodels.layers.embedding import ScaledEmbedding
from ligermodels.layers.experts import (
    Experts,
    Router,
    Routes,
    Routing,
    SharedExperts,
    expert_counts,
    load_balancing_loss,
    router_z_loss,
)
from ligermodels.layers.fusion import PreNormed, pre_norm
from ligermodels.layers.gated_delta import DeltaState, GatedDeltaNet, LinearAttention
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.loss_head import HeadOutput, LossHead
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import LayerNorm, RMSNorm, UnitRMSNorm
from ligermodels.layers.rotary import RotaryEmbedding

__all__ = [
    "Attention",
    "AttentionContext",
    "AttentionMask",
    "ClampedSwiGLU",
    "CrossAttention",
    "DecoderBlock",
    "DeltaState",
    "Experts",
    "GatedDeltaNet",
    "GatedMLP",
    "HeadOutput",
    "KVCache",
    "LayerNorm",
    "LinearAttention",
    "LinearBlock",
    "LossHead",
    "PreNormed",
    "RMSNorm",
    "RotaryEmbedding",
    "Router",
    "Routes",
    "Routing",
    "SandwichBlock",
    "ScaledEmbedding",
    "SharedExperts",
    "UnitRMSNorm",
    "expert_counts",
    "load_balancing_loss",
    "pre_norm",
    "router_z_loss",
]
