"""Linears whose products run in float8, with the same parameters as before."""

from ligermodels.float8.convert import casts_bytes, convert, report, weights_cast_once
from ligermodels.float8.linear import Float8Linear
from ligermodels.float8.saved_scales import load_scales, overflows, scales

__all__ = [
    "Float8Linear",
    "casts_bytes",
    "convert",
    "load_scales",
    "overflows",
    "report",
    "scales",
    "weights_cast_once",
]
