"""The ops under measurement: inputs of a size, implementations, and what each must move.

Each module ends with the table of its ops, and an op is one entry of one of them. Bytes are the
fewest that the op can move, each input read and each output written once a pass; what is saved
between the passes counts, statistics and weights of a row's width do not.
"""

from benchmarks.cases import glu, linears, losses, norms, ropes
from benchmarks.cases.base import Absent, Case, Implementation, Op, Random

__all__ = ["OPS", "Absent", "Case", "Implementation", "Op", "Random"]

OPS = norms.OPS | glu.OPS | ropes.OPS | linears.OPS | losses.OPS
