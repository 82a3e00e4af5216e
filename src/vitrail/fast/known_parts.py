"""Which parts of a Vision Transformer the fast paths do not know, so that none computes another function in silence."""

from __future__ import annotations

from vitrail.model.architecture import VitArchitecture


def find_unknown_part(a: VitArchitecture) -> str | None:
    """Return in words the first part that the paper's block does not have; None if all parts are the paper's.

    Fast paths that compute just that block in their own way (`last_block`, `cpu/int8`) ask this first. Those that keep
    the model's own forward pass (packed layers, compilers) need not; the kernels for GPUs know more parts.
    """
    for is_unknown, part in (
        (a.rotary is not None, "rotary positions"),
        (a.position == "relative-bias", "a relative bias"),
        (a.mlp != "gelu", "SwiGLU"),
        (a.qk_norm, "a norm on queries and keys"),
        (a.attention_norm, "a norm inside attention"),
        (a.mlp_norm, "a norm inside the MLP"),
        (a.qkv_bias and not a.key_bias, "keys without a bias"),
        (not a.out_bias or not a.mlp_bias, "layers without a bias"),
        (a.norm_at != "before", "norms behind the layers"),
        (not a.final_norm, "a model without a last norm"),
        (a.patch_norm, "a norm on patches"),
    ):
        if is_unknown:
            return part
    return None


def find_unfused_part(a: VitArchitecture) -> str | None:
    """Return in words the first part that no fused kernels for GPUs know; None if those for inference know all."""
    for is_unknown, part in (
        (a.position == "relative-bias", "a relative bias"),
        (a.norm_at != "before", "norms behind the layers"),
        (a.block == "axial", "axial attention"),
        (a.position == "relative", "relative positions"),
        (a.position_at != "input", "positions in every layer"),
    ):
        if is_unknown:
            return part
    return None
