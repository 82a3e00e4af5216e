"""Names of models: "B/16", "R50+L/32", "BiT-R152x4" → an architecture."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from vitrail.errors import ConfigError, did_you_mean
from vitrail.model.architecture import BACKBONE_OPTIONS, Architecture, Backbone, ResNetArchitecture, VitArchitecture


class Size(NamedTuple):
    """The sizes that a letter stands for."""

    depth: int
    width: int
    mlp_dim: int
    num_heads: int


SIZES = {
    # "How to train your ViT?" (AugReg), arXiv 2106.10270, table 2
    "Ti": Size(depth=12, width=192, mlp_dim=768, num_heads=3),
    "S": Size(depth=12, width=384, mlp_dim=1536, num_heads=6),
    # The paper, arXiv 2010.11929, figure 4: B with all hidden dimensions halved. A head's 64 channels are one of them:
    # 12 heads of 32, not the 6 of 64 of AugReg's S, which is equal otherwise.
    "b": Size(depth=12, width=384, mlp_dim=1536, num_heads=12),
    # The paper, table 1
    "B": Size(depth=12, width=768, mlp_dim=3072, num_heads=12),
    "L": Size(depth=24, width=1024, mlp_dim=4096, num_heads=16),
    "H": Size(depth=32, width=1280, mlp_dim=5120, num_heads=16),
    # "Scaling Vision Transformers", arXiv 2106.04560, table 2
    "g": Size(depth=40, width=1408, mlp_dim=6144, num_heads=16),
    "G": Size(depth=48, width=1664, mlp_dim=8192, num_heads=16),
}

RESNET_BLOCKS = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}

# Details that differ between the authors' two ResNets, each from its own released code.
HYBRID: dict[str, Any] = {"form": "hybrid", "norm_eps": 1e-6, "standardise_by": "std", "standardise_eps": 1e-5}
BIT: dict[str, Any] = {"form": "bit", "norm_eps": 1e-5, "standardise_by": "variance", "standardise_eps": 1e-10}

LISTED_NAMES = (
    *("Ti/16", "S/32", "S/16", "S/8", "b/32", "b/16", "B/32", "B/16", "B/8", "L/32", "L/16", "H/14", "g/14", "G/14"),
    *("R26+S/32", "R50+B/32", "R50+B/16", "R50+L/32", "R50+L/16"),
    *("BiT-R50x1", "BiT-R50x3", "BiT-R101x1", "BiT-R101x3", "BiT-R152x2", "BiT-R152x4", "BiT-R200x3"),
)
"""The names that `vitrail models` lists; any size can be combined with any patch, any ResNet with any width."""

_LETTERS = "|".join(SIZES)
_VIT = re.compile(rf"(?:ViT-)?({_LETTERS})/([1-9]\d*)")
_HYBRID = re.compile(rf"R(\d+)\+(?:ViT-)?({_LETTERS})/([1-9]\d*)")
_LETTER_OF_WORD = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g", "gigantic": "G"}
_TIMM = re.compile(rf"(?:vit|deit)_({'|'.join(_LETTER_OF_WORD)})_patch(\d+)")
_BIT = re.compile(r"BiT-R(\d+)x([1-9]\d*)")


def make_architecture(name: str, **options: Any) -> Architecture:
    """Return the architecture of a name, with `options` (fields of the architecture) changed.

    A name with a ResNet also takes fields of its backbone: root, stage_channels and blocks. With root="small" the
    stride of a hybrid is a quarter of the one in its name.

    `architecture("B/16")`, `architecture("R50+B/16", image_size=384)`, `architecture("BiT-R26x1", root="small")`.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a model's name is a string such as 'B/16', not {name!r}")
    if match := _VIT.fullmatch(name):
        letter, patch = match.groups()
        if given := [option for option in BACKBONE_OPTIONS if option in options]:
            raise ConfigError(
                f"{name!r} has no ResNet, so it takes no {' and no '.join(given)}: give a hybrid (R26+{letter}/16) or "
                "a BiT ResNet (BiT-R26x1)"
            )
        return VitArchitecture(**{"patch_size": int(patch), **SIZES[letter]._asdict(), **options})
    if match := _HYBRID.fullmatch(name):
        depth, letter, stride = match.groups()
        fields = {"blocks": _find_hybrid_blocks(name, int(depth), int(stride)), **HYBRID}
        backbone, options = _make_backbone(fields, options)
        # A patch is one pixel of the feature map unless the options say otherwise.
        return VitArchitecture(**{"patch_size": 1, "backbone": backbone, **SIZES[letter]._asdict(), **options})
    if match := _BIT.fullmatch(name):
        depth, factor = match.groups()
        fields = {"blocks": _find_resnet_blocks(name, int(depth)), "width_factor": int(factor), **BIT}
        backbone, options = _make_backbone(fields, options)
        return ResNetArchitecture(**{"backbone": backbone, **options})
    raise ConfigError(f"unknown model {name!r}{_suggest_name(name)}; `vitrail models` lists them")


def _make_backbone(fields: dict[str, Any], options: dict[str, Any]) -> tuple[Backbone, dict[str, Any]]:
    """Return the backbone with those options that are its own, and the other options."""
    own = {option: options[option] for option in BACKBONE_OPTIONS if option in options}
    if own and "backbone" in options:
        raise ConfigError(f"a backbone was given whole: put {' and '.join(own)} into it")
    return Backbone(**{**fields, **own}), {name: value for name, value in options.items() if name not in own}


def _suggest_name(name: str) -> str:
    """Return a suggestion of the right name, or how names are formed."""
    if name.startswith(("hf:", "timm:")) or name == "pane":
        return ", which is the name of weights: give it to vitrail.load"
    if match := _TIMM.match(name):
        return f", did you mean {_LETTER_OF_WORD[match.group(1)]}/{match.group(2)}?"
    return did_you_mean(name, LISTED_NAMES) or (
        f": a name is SIZE/PATCH with a size of {', '.join(SIZES)} (B/16), RDEPTH+SIZE/16 or /32 (R50+B/16) or "
        "BiT-RDEPTHxWIDTH (BiT-R50x1)"
    )


def _find_resnet_blocks(name: str, depth: int) -> tuple[int, ...]:
    if depth not in RESNET_BLOCKS:
        known = ", ".join(f"R{known}" for known in RESNET_BLOCKS)
        raise ConfigError(f"unknown ResNet R{depth} in {name!r}: there are {known}")
    return RESNET_BLOCKS[depth]


def _find_hybrid_blocks(name: str, depth: int, stride: int) -> tuple[int, ...]:
    """Return the blocks of each stage. For /16 there is no stage 4: stage 3 gets its blocks (section 4.1)."""
    blocks = _find_resnet_blocks(name, depth)
    if stride == 32:
        return blocks
    if stride == 16:
        return (*blocks[:2], blocks[2] + blocks[3])
    raise ConfigError(f"a hybrid takes its patches at 1/16 or 1/32 of the image, so {name!r} must end in /16 or /32")
