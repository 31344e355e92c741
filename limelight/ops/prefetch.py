"""For kernels: weights that a later kernel reads, brought to L2 while memory has nothing to do."""

import triton
import triton.language as tl


@triton.jit
def prefetch(weight, SIZE: tl.constexpr, THREADS: tl.constexpr = 256):
    """Ask for SIZE elements from `weight` on. Needs a GPU: neither waits nor says when it is done."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    for start in tl.static_range(0, SIZE, THREADS * LINE):
        # Behind the end the last line is asked for again.
        at = tl.minimum(start + tl.arange(0, THREADS) * LINE, SIZE - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + at],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
