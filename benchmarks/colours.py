"""The colour of each implementation in the pictures of the benchmarks."""

from ligermodels.pictures import ORDER

OURS, ORANGE, GREEN, PINK, LIGHT_BLUE, RED, GREY = ORDER
COLOURS = {
    "ligermodels": OURS,
    "transformers": GREY,
    "eager": GREY,
    "torch.compile": LIGHT_BLUE,
    "torch": RED,
    "F.rms_norm": RED,
    "liger": ORANGE,
    "trl": GREEN,
    "cce": PINK,
}
