"""Cut images into flattened patches, in one pass over memory.

Shapes: B images, C channels, H×W pixels, P patch side, N patches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.overlap import begin, is_compiled, overlap_options


@triton.jit
def cut_kernel(
    images, out, height, width, columns,
    channels: tl.constexpr, side: tl.constexpr, padded_side: tl.constexpr, padded_width: tl.constexpr,
    chip: tl.constexpr,
):  # fmt: skip
    """Cut one channel of one row of patches."""
    # images (B, C, H, W), out (B·N, C·P·P); columns = W/P; one program per (image, row of patches, channel).
    begin(chip)
    number = tl.program_id(0)
    channel = number % channels
    row = number // channels % (height // side)
    image = (number // channels // (height // side)).to(tl.int64)
    y, x = tl.arange(0, padded_side)[:, None], tl.arange(0, padded_width)[None, :]
    mask = (y < side) & (x < width)
    pixels = tl.load(
        images + ((image * channels + channel) * height + row * side + y) * width + x, mask=mask, other=0.0
    )
    patch = (image * (height // side) + row) * columns + x // side
    place = patch * (channels * side * side) + channel * side * side + y * side + x % side
    tl.store(out + place, pixels.to(out.dtype.element_ty), mask=mask)


def cut_patches(images: Tensor, side: int, dtype: torch.dtype) -> Tensor:
    """(B, C, H, W) → (B·N, C·P·P) as `dtype`: patches row by row, each flattened as (channel, row, column)."""
    images = images.contiguous()
    count, channels, height, width = images.shape
    assert height % side == 0
    assert width % side == 0
    rows, columns = height // side, width // side
    out = torch.empty(count * rows * columns, channels * side * side, dtype=dtype, device=images.device)
    cut_kernel[(count * rows * channels,)](
        images, out, height, width, columns, channels, side,
        triton.next_power_of_2(side), triton.next_power_of_2(width), is_compiled(),
        num_warps=4, **overlap_options(),
    )  # fmt: skip
    return out
