"""The largest absolute value of what a kernel writes, recorded by the kernel itself."""

import triton
import triton.language as tl


@triton.jit
def _record_amax(amax_ptr, x):
    """Raise the number at amax_ptr, the bits of a float32 in an int32, to the largest |x|.

    The bits of positive floats have the order of the floats, and those of a NaN come last.
    """
    most = tl.max(tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True))
    # Most programs find a larger number there, and need not wait for each other.
    known = tl.load(amax_ptr, cache_modifier=".cg")
    tl.atomic_max(amax_ptr, most, mask=most > known, sem="relaxed")
