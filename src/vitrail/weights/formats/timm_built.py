"""Read a network that timm has built: the arguments that tensors do not show, as a config.json would hold them, and
the config of a network that vitrail keeps as timm's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.config import Origin, show_size
from vitrail.errors import ConfigError
from vitrail.model.architecture import TimmArchitecture
from vitrail.weights.formats.base import IMAGENET
from vitrail.weights.formats.native import describe_config
from vitrail.weights.formats.timm_config import TimmConfig, read_labels, read_preprocessing

ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "silu"}
ROTARY_KINDS = {"RotaryEmbeddingCat": "cat", "RotaryEmbeddingMixed": "mixed", "RotaryEmbeddingDinoV3": "dinov3"}
"""timm's word for each of its classes of rotary positions."""
POST_NORM_BLOCKS = ("EvaBlockPostNorm", "ResPostBlock")


def read_arguments(network: Any) -> dict[str, Any]:
    """Return the arguments of a network of timm's; for one that is no Vision Transformer, hardly any."""
    blocks: Any = getattr(network, "blocks", None)
    pool: Any = getattr(network, "attn_pool", None)
    arguments: dict[str, Any] = {"pos_embed": "none" if getattr(network, "pos_embed", None) is None else None}
    arguments["global_pool"] = getattr(network, "global_pool", None)
    if not hasattr(blocks, "__getitem__"):
        return arguments
    block = blocks[0]
    attention, mlp, norm = (getattr(block, part, None) for part in ("attn", "mlp", "norm1"))
    activation = type(getattr(mlp, "act", None)).__name__
    return {
        **arguments,
        "num_heads": getattr(attention, "num_heads", None),
        "act_layer": ACTIVATIONS.get(activation, activation if mlp is not None else None),
        "norm_eps": getattr(norm, "eps", None),
        "final_norm": any(type(getattr(network, part, None)).__name__ != "Identity" for part in ("norm", "fc_norm")),
        "pool_include_prefix": getattr(network, "pool_include_prefix", None),
        "attn_pool_num_heads": getattr(pool, "num_heads", None),
        "is_eva": type(network).__name__ == "Eva",
        "use_post_norm": type(block).__name__ in POST_NORM_BLOCKS,
        "use_rot_pos_emb": getattr(network, "rope", None) is not None,
        **_read_rotary(getattr(network, "rope", None), attention),
    }


def _read_rotary(rope: Any, attention: Any) -> Mapping[str, Any]:
    if rope is None:
        return {}
    kind = type(rope).__name__
    return {
        "rope_type": ROTARY_KINDS.get(kind, kind),
        "rope_temperature": getattr(rope, "temperature", None),
        "rope_grid_offset": getattr(rope, "grid_offset", None),
        "rope_grid_indexing": getattr(rope, "grid_indexing", None),
        "rope_rotate_half": getattr(attention, "rotate_half", False),
        "ref_feat_shape": getattr(rope, "ref_feat_shape", None),
        **{f"rope_{name}_coords": getattr(rope, f"{name}_coords", None) for name in ("shift", "jitter", "rescale")},
    }


def describe_timm_network(source: str, pretrained: Mapping[str, Any], num_classes: int) -> dict[str, Any]:
    """Return the native config.json of a network of timm's, from timm's description of its weights.

    The image size is timm's size for tests if it has one, because timm's accuracies are measured at that size.
    """
    name = f"{pretrained['architecture']}.{pretrained.get('tag') or ''}".rstrip(".")
    if source.removeprefix("timm:").partition(".")[0] != pretrained["architecture"]:
        raise ConfigError(f"{source}: timm's own networks are found by a plain name, as in timm:{name}")
    channels, *size = pretrained.get("test_input_size") or pretrained["input_size"]
    architecture = TimmArchitecture(name=name, image_size=size, in_channels=channels, num_classes=num_classes)
    crop = pretrained.get("test_crop_pct") or pretrained["crop_pct"]
    config: TimmConfig = TimmConfig.parse({"pretrained": {**pretrained, "crop_pct": crop}}, source)
    notes: list[str] = []
    trained = tuple(pretrained["input_size"][1:])
    if architecture.image_size != trained:
        notes.append(
            f"the image size is {show_size(architecture.image_size)}, timm's size for tests; it was trained "
            f"at {show_size(trained)}"
        )
    preprocessing = read_preprocessing(config, architecture, IMAGENET, notes)  # type: ignore[arg-type]  # sizes alone
    labels = read_labels(config, num_classes, notes)
    origin = Origin(source=source, format="timm", licence=config.pretrained.license, notes=tuple(notes))
    return describe_config(architecture, preprocessing, labels, origin)
