"""The ops that are measured: their inputs, their implementations, and the bytes they must move.

Each module ends with the table of its ops, OPS, and each op has one entry in it. The bytes are the
fewest that an op can move: each pass reads each input once and writes each output once. Tensors
that forward saves for backward count. Statistics, and weights as wide as one row, do not count.
"""

from benchmarks.cases import experts, gated_delta, glu, linears, losses, norms, ropes, token_losses
from benchmarks.cases.base import Absent, Case, Implementation, Op, Random

__all__ = ["OPS", "Absent", "Case", "Implementation", "Op", "Random"]

OPS = norms.OPS | glu.OPS | ropes.OPS | linears.OPS | losses.OPS
OPS |= token_losses.OPS | experts.OPS | gated_delta.OPS
