"""Which parts of a Vision Transformer the fast paths do not know, so that none computes another function in silence."""

from __future__ import annotations

from vitrail.model.architecture import VitArchitecture


def find_unknown_part(a: VitArchitecture) -> str | None:
    """Return in words the first part that no fast path of vitrail's own knows; None if they know all parts.

    Fast paths that compute an encoder block in their own way (`last_block`, `cpu/int8`, `gpu/`) ask this first. Those
    that keep the model's own forward pass (packed layers, compilers) need not.
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
