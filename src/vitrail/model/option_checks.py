"""Which options of a Vision Transformer fit together: each check raises a ValueError that is a sentence.

This file does not import torch, so that architectures can be checked quickly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.model.architecture import Rotary, VitArchitecture

POOLS_WITH_CLASS_TOKEN = ("class", "class+average", "distilled")


def check_vit(a: VitArchitecture) -> None:
    """Raise a ValueError if options contradict each other, or if the image size does not divide into patches."""
    if a.width % a.num_heads:
        raise ValueError(f"width {a.width} is not divisible by num_heads {a.num_heads}")
    _check_pool(a)
    _check_norms_and_biases(a)
    _check_conv_stem(a)
    _check_positions(a)
    if a.rotary is not None:
        _check_rotary(a, a.rotary)
    if a.block == "axial" and (a.class_token or a.registers):
        raise ValueError(
            "axial blocks attend along rows and columns of patches, and a class token or registers lie on "
            'neither: use pool "average" or "attention" and no registers'
        )
    a.grid(a.image_size)


def _check_pool(a: VitArchitecture) -> None:
    if a.pool in POOLS_WITH_CLASS_TOKEN and not a.class_token:
        raise ValueError(f'pool "{a.pool}" reads the class token: leave class_token on, or pool by "average"')
    if a.pool == "distilled" and (not a.registers or a.representation_size):
        raise ValueError('pool "distilled" reads a register and has two linear heads: give registers=1')
    if a.pool != "attention" and (a.pool_heads or a.pool_mlp_dim or a.pool_prefix):
        raise ValueError('pool_heads, pool_mlp_dim and pool_prefix belong to pool "attention"')
    if a.pool_heads and a.width % a.pool_heads:
        raise ValueError(f"width {a.width} is not divisible by pool_heads {a.pool_heads}")


def _check_norms_and_biases(a: VitArchitecture) -> None:
    if a.norm_after_pool and a.pool in ("class+average", "distilled"):
        raise ValueError(f'norm_after_pool has no meaning with pool "{a.pool}"')
    if a.norm_after_pool and not a.final_norm:
        raise ValueError("norm_after_pool moves the last norm, which final_norm=False leaves out: choose one")
    if not a.key_bias and not a.qkv_bias:
        raise ValueError("key_bias=False takes the keys out of qkv_bias, which is off already: leave key_bias alone")


def _check_conv_stem(a: VitArchitecture) -> None:
    if a.conv_stem is None:
        return
    if a.backbone is not None:
        raise ValueError("conv_stem and a ResNet backbone both replace the patch projection: choose one")
    if not a.patch_bias:
        raise ValueError("patch_bias belongs to the patch projection, which conv_stem replaces")
    stride = math.prod(layer.stride for layer in a.conv_stem)
    if stride != a.patch_size:
        raise ValueError(f"the strides of conv_stem multiply to {stride}, but the patch size is {a.patch_size}")


def _check_positions(a: VitArchitecture) -> None:
    if a.position == "learned-2d" and a.width % 2:
        raise ValueError(f'position "learned-2d" halves the width, and {a.width} is odd')
    if a.position == "sin-cos" and (a.width % 4 or a.width < 8):
        raise ValueError(f'position "sin-cos" needs a width divisible by 4 and at least 8, not {a.width}')
    if a.position == "relative" and a.position_at != "input":
        raise ValueError('position "relative" acts inside every attention already: leave position_at alone')
    if a.position == "relative-bias" and a.position_at == "input":
        raise ValueError('position "relative-bias" acts in every attention: give position_at "every-layer" or "shared"')
    if a.position == "relative-bias" and a.registers:
        raise ValueError('position "relative-bias" has entries for patches and the class token only: give registers=0')
    if a.position in ("relative", "relative-bias") and a.block == "axial":
        raise ValueError(f'position "{a.position}" counts offsets over the whole image; axial blocks see one row')


def _check_rotary(a: VitArchitecture, rotary: Rotary) -> None:
    if a.head_width % 4:
        raise ValueError(f"rotary positions need heads whose width is divisible by 4, not {a.head_width}")
    if a.block == "axial":
        raise ValueError("rotary positions turn by row and column, and axial blocks see one of them: use plain blocks")
    if rotary.learned and rotary.coordinates != "index":
        raise ValueError(
            'learned rotary frequencies are multiplied by row and column numbers: give coordinates "index"'
        )


def check_rotary_options(rotary: Rotary) -> None:
    """Raise a ValueError if options of rotary positions contradict each other."""
    changes = (rotary.shift, rotary.jitter, rotary.rescale)
    if rotary.coordinates == "index" and any(change is not None for change in changes):
        raise ValueError('rotary shift, jitter and rescale change coordinates in [−1, 1]: give coordinates "unit"')
    if rotary.coordinates == "unit" and (rotary.offset or rotary.reference_grid):
        raise ValueError('rotary offset and reference_grid belong to coordinates "index"')
