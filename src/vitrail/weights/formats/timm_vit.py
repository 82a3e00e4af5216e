"""Vision Transformers in timm's format: what their tensors and arguments say, and the rules for their names.

timm has three kinds of blocks: those of its `vision_transformer` file, those of `eva` (no bias of keys, separate
projections, `gamma_1`) and those of `beit` (relative bias). They differ in names alone, and a file is read by what it
holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.config import show_size
from vitrail.errors import WeightsError
from vitrail.model.architecture import VitArchitecture
from vitrail.weights.formats.base import (
    CLIP,
    HALF,
    IMAGENET,
    CheckpointInfo,
    Tensors,
    check_agreement,
    count_blocks,
    infer_grid,
    infer_relative_grid,
    read_patch_size,
    read_shape,
    read_size,
)
from vitrail.weights.formats.timm_config import (
    ModelArguments,
    TimmConfig,
    complete_arguments,
    read_gelu,
    read_image_size,
    read_num_heads,
    read_pool,
    read_preprocessing,
    read_rotary,
)
from vitrail.weights.formats.timm_names import find_facts, may_be_rope_ape, recognise_family
from vitrail.weights.formats.timm_resnet import IN_HYBRID, find_stem, list_backbone_rules, read_backbone
from vitrail.weights.known import KnownFacts
from vitrail.weights.tensor_rules import ADD_BATCH_AXIS, TensorRule, split_into, to_patch_kernel

TABLE_IN_BLOCK = "blocks.0.attn.relative_position_bias_table"
SHARED_TABLE = "rel_pos_bias.relative_position_bias_table"
COMPUTED = ("relative_position_index", "rope.periods", "rope.freqs_cos", "rope.freqs_sin", "attn.k_bias", "bias_mask")
"""The ends of the names of tensors that are computed from sizes, or are zero; older files hold them."""
REGISTERS = {"dinov2": "register_tokens", "distilled": "dist_token"}
"""The name of the tokens after the class token, by release, if it is not `reg_token`."""
REFUSALS = {
    "blocks.0.in_proj.weight": "its blocks compute attention and MLP side by side, and vitrail's one after the other",
    "blocks.0.attns.0.norm.weight": "each of its blocks has two attentions side by side, where vitrail's have one",
    "blocks.0.attn.lambda_q1": "its attention is the difference of two (differential attention), which vitrail lacks",
    "blocks.0.attn.gate.weight": "its attention has a gate, which vitrail's lacks",
    f"{IN_HYBRID}0.conv.weight": "its stem is MobileCLIP's, whose convolutions have no padding as vitrail's have",
    f"{IN_HYBRID}conv1.0.weight": "the ResNet in front of it has batch norm (ResNet-D), and vitrail's have group norm",
}
"""Why models cannot be loaded, by the name of a tensor that shows it."""


def explain_blocks_refusal(own: Tensors) -> str | None:
    """Return why vitrail has no such model, or None if it may have it."""
    for name, reason in REFUSALS.items():
        if name in own:
            return reason
    for name, info in own.items():
        query = own.get(name.replace(".k_proj.", ".q_proj."))
        if name.endswith("attn.k_proj.weight") and query is not None and info.shape != query.shape:
            return "several of its heads share keys and values (grouped-query attention), which vitrail lacks"
    if "blocks.0.gamma_1" in own and "blocks.0.gamma_2" not in own:
        return "it has layer scale behind attention and not behind the MLP, where vitrail has both or none"
    if "pos_embed" in own and (TABLE_IN_BLOCK in own or SHARED_TABLE in own):
        return "it has a position table and relative positions, and vitrail has one of the two"
    return None


def describe_vit(own: Tensors, config: TimmConfig, known: KnownFacts, facebook: bool) -> CheckpointInfo:
    """Describe a Vision Transformer from the shapes of its tensors, its config file, its name and what is known."""
    if reason := explain_blocks_refusal(own):
        raise WeightsError(reason)
    notes: list[str] = []
    release = _find_release(own)
    kernel = read_shape(own, "patch_embed.proj.weight", 4)
    width, side = kernel[0], read_patch_size(kernel, (2, 3))
    backbone = read_backbone(own, IN_HYBRID, "hybrid") if any(n.startswith(IN_HYBRID) for n in own) else None
    stride = side * (backbone.stride if backbone else 1)
    class_token = "cls_token" in own
    registers = read_size(own, REGISTERS.get(release, "reg_token"), 3, axis=1) or 0
    depth, mlp = count_blocks(own, "blocks."), _read_mlp(own)
    check_agreement("config.json", config.arguments.model_dump(), {"depth": depth, "embed_dim": width})
    size = read_image_size(config)
    hint = known.grid or (size and (size[0] // stride, size[1] // stride))
    grid, position = _read_table(own, hint, class_token, registers)
    facts: Mapping[str, Any] = find_facts(config.architecture)
    if not config.architecture:
        family, facts = recognise_family(own, width, mlp["mlp"] == "swiglu", grid)
        if family:
            notes.append(f"rotary positions, heads, pooling and norms as in {family}: no config says them")
        elif may_be_rope_ape(own):
            notes.append(
                "DeiT III assumed; RoPE-APE has the same tensors, and rotary positions beside its table: if it is one, "
                'put a config.json with its name beside it, {"architecture": "vit_small_patch16_rope_ape_224"}'
            )
    arguments = complete_arguments(config, facts)
    rotary = read_rotary(arguments)
    if grid is None:
        if known.grid is not None:
            size = (known.grid[0] * stride, known.grid[1] * stride)
        elif size is None and rotary is not None:
            size = _choose_size(stride, notes)
        if size is None or (rotary is None and arguments.has_table):
            raise WeightsError(
                "it has no position table, and no config beside it says that it needs none: its positions may be "
                "rotary, which tensors do not show"
            )
        image_size = size
    else:
        image_size = (grid[0] * stride, grid[1] * stride)
    if size and size != image_size:
        notes.append(f"images are taken at {show_size(image_size)} pixels, not at its config's {show_size(size)}")
    input_norm = "norm_pre.weight" in own
    seen = _count_heads(own, width)
    if seen and known.num_heads not in (None, seen):
        raise WeightsError(f"its tensors have {seen} attention heads, so there cannot be {known.num_heads}")
    heads = known.num_heads or read_num_heads(arguments, width, seen, notes)
    gelu = read_gelu(config, arguments, notes) if mlp["mlp"] == "gelu" else "exact"
    stem = find_stem(own, IN_HYBRID)
    architecture = VitArchitecture(
        image_size=image_size,
        in_channels=read_shape(own, f"{stem}conv.weight", 4)[1] if backbone else kernel[1],
        patch_size=side,
        width=width,
        depth=depth,
        num_heads=heads,
        num_classes=read_size(own, "head.weight", 2) or 0,
        class_token=class_token,
        registers=registers,
        **mlp,
        **_read_pooling(own, arguments, heads, mlp["mlp_dim"], class_token + registers),
        norm_after_pool="fc_norm.weight" in own,
        final_norm=_has_final_norm(own, config, arguments, notes),
        **position,
        position_resize="bicubic-offset" if _is_plain_dinov2(own, release) else "bicubic-antialias",
        rotary=rotary,
        representation_size=read_size(own, "pre_logits.fc.weight", 2),
        backbone=backbone,
        layer_scale=(arguments.init_values or 1.0) if _name_scale(release, 1).format(i=0) in own else None,
        gelu=gelu,
        norm="layer" if any(name.startswith("blocks.") and name.endswith("norm1.bias") for name in own) else "rms",
        norm_eps=arguments.norm_eps or (1e-5 if input_norm and not config.architecture else 1e-6),
        norm_at="after" if arguments.use_post_norm else "before",
        input_norm=input_norm,
        patch_norm="patch_embed.norm.weight" in own,
        patch_bias="patch_embed.proj.bias" in own,
        **_read_attention(own),
    )
    return CheckpointInfo(
        architecture,
        read_preprocessing(config, architecture, _guess_statistics(own, facts, bool(release) or facebook), notes),
        dialect=release,
        unused_tensors=[name for name in ("mask_token",) if name in own],
        ignored_tensors=[name for name in own if name.startswith("decoder") or name.endswith(COMPUTED)],
        notes=notes,
    )


def _read_mlp(own: Tensors) -> dict[str, Any]:
    """Return the options of the MLPs."""
    options = {"mlp_norm": "blocks.0.mlp.norm.weight" in own, "mlp_bias": _has_biases(own)}
    if gate := read_size(own, "blocks.0.mlp.fc1_g.weight", 2):
        return {"mlp": "swiglu", "mlp_dim": gate, **options}
    hidden = read_shape(own, "blocks.0.mlp.fc1.weight", 2)[0]
    packed = hidden == 2 * read_shape(own, "blocks.0.mlp.fc2.weight", 2)[1]
    return {"mlp": "swiglu" if packed else "gelu", "mlp_dim": hidden // 2 if packed else hidden, **options}


def _read_attention(own: Tensors) -> dict[str, Any]:
    """Return the options of attention that the tensors show."""
    block = "blocks.0.attn."
    no_key_bias = f"{block}q_bias" in own or (f"{block}q_proj.bias" in own and f"{block}k_proj.bias" not in own)
    return {
        "qkv_bias": no_key_bias or f"{block}qkv.bias" in own or f"{block}q_proj.bias" in own,
        "key_bias": not no_key_bias,
        "out_bias": _has_biases(own),
        "qk_norm": f"{block}q_norm.weight" in own,
        "attention_norm": f"{block}norm.weight" in own,
    }


def _has_biases(own: Tensors) -> bool:
    """Return whether attention's output and the MLPs have biases: in timm all of them have, or none has."""
    return any(name.startswith("blocks.") and name.endswith(("attn.proj.bias", "mlp.fc2.bias")) for name in own)


def _count_heads(own: Tensors, width: int) -> int | None:
    """Return the number of heads if a tensor shows it."""
    for table in (TABLE_IN_BLOCK, SHARED_TABLE):
        if heads := read_size(own, table, 2, axis=1):
            return heads
    if heads := read_size(own, "rope.freqs", 4, axis=2):
        return heads
    head_width = read_size(own, "blocks.0.attn.q_norm.weight", 1)
    return width // head_width if head_width else None


def _read_pooling(own: Tensors, arguments: ModelArguments, heads: int, mlp_dim: int, prefix: int) -> dict[str, Any]:
    """Return the options of pooling."""
    if "head_dist.weight" in own:
        return {"pool": "distilled"}
    if "attn_pool.latent" not in own:
        usual = "average" if "fc_norm.weight" in own or "cls_token" not in own else "class"
        return {"pool": read_pool(arguments) or usual}
    pool_heads, pool_mlp_dim = arguments.attn_pool_num_heads, read_shape(own, "attn_pool.mlp.fc1.weight", 2)[0]
    return {
        "pool": "attention",
        "pool_heads": None if pool_heads == heads else pool_heads,
        "pool_mlp_dim": None if pool_mlp_dim == mlp_dim else pool_mlp_dim,
        "pool_prefix": bool(prefix) and (arguments.pool_include_prefix or arguments.is_eva),
    }


def _has_final_norm(own: Tensors, config: TimmConfig, arguments: ModelArguments, notes: list[str]) -> bool:
    """Return whether there is a last norm. A file that should have one and does not is incomplete."""
    if "norm.weight" in own or "fc_norm.weight" in own:
        return True
    if config.architecture:
        return arguments.has_final_norm
    notes.append("no norm behind the last block: the file holds none, and no config says that it is incomplete")
    return False


def _read_table(
    own: Tensors, hint: tuple[int, int] | None, class_token: bool, registers: int
) -> tuple[tuple[int, int] | None, dict[str, Any]]:
    """Return the grid of the position table, if there is one, and the options of the position embedding."""
    if TABLE_IN_BLOCK in own or SHARED_TABLE in own:
        table = TABLE_IN_BLOCK if TABLE_IN_BLOCK in own else SHARED_TABLE
        at = "every-layer" if table == TABLE_IN_BLOCK else "shared"
        grid = infer_relative_grid(read_shape(own, table, 2)[0], class_token, hint)
        return grid, {"position": "relative-bias", "position_at": at}
    if "pos_embed" not in own:
        return None, {"position": "none"}
    owners = {"all": class_token + registers, "class": int(class_token), "none": 0}
    grid, owner = infer_grid(read_shape(own, "pos_embed", 3)[1], owners, hint)
    # With only a class token "all" and "class" mean the same; the paper's word is "class".
    return grid, {"position": "learned-1d", "position_prefix": "class" if owner == "all" and not registers else owner}


def _choose_size(stride: int, notes: list[str]) -> tuple[int, int]:
    """Return the image size of a model with rotary positions whose file names none: it runs at any."""
    side = 224 // stride * stride or stride
    notes.append(f"image size {side}, because the file names none: rotary positions suit any size")
    return side, side


def _find_release(own: Tensors) -> str:
    """Return the release whose names differ from timm's, or an empty string; `+split-qkv` and the like follow.

    `deit3` stands for `gamma_1` instead of `ls1.gamma`, which timm's own eva and beit files have too.
    """
    words = []
    if "dist_token" in own:
        words.append("distilled")
    elif "blocks.0.gamma_1" in own:
        words.append("deit3")
    elif "register_tokens" in own or ("mask_token" in own and "blocks.0.ls1.gamma" in own):
        words.append("dinov2")
    else:
        words.append("")
    if "blocks.0.attn.q_proj.weight" in own:
        words.append("split-qkv")
    if "blocks.0.mlp.fc1_g.weight" in own:
        words.append("split-gate")
    return "+".join(words)


def _is_plain_dinov2(own: Tensors, release: str) -> bool:
    """Return whether it is Meta's own file of DINOv2 without registers; those with registers resize as timm does."""
    return release == "dinov2" and "register_tokens" not in own


def _name_scale(release: str, which: int) -> str:
    gamma = release.partition("+")[0] == "deit3"
    return f"blocks.{{i}}.gamma_{which}" if gamma else f"blocks.{{i}}.ls{which}.gamma"


def _guess_statistics(own: Tensors, facts: Mapping[str, Any], facebook: bool) -> Mapping[str, Any]:
    """Guess the mean and std of a checkpoint without a config.

    CLIP has a norm before the first block; EVA, AIMv2 and Perception Encoder are known by their blocks. Facebook's
    releases (DeiT, DINO, MAE) have the key "model", layer scale or no head; Google's models, as converted by timm, have
    a head and none of these.
    """
    if facts.get("attn_pool_num_heads") or TABLE_IN_BLOCK in own or SHARED_TABLE in own:
        return HALF  # Perception Encoder, BEiT
    if "norm_pre.weight" in own or "blocks.0.attn.q_bias" in own or "patch_embed.norm.weight" in own:
        return IMAGENET if facts.get("rope_type") == "dinov3" else CLIP
    facebook = facebook or "blocks.0.ls1.gamma" in own or "head.weight" not in own
    return IMAGENET if facebook else HALF


BLOCK = [
    TensorRule("encoder.blocks.{i}.norm1.*", "blocks.{i}.norm1.*"),
    TensorRule("encoder.blocks.{i}.attention.q_norm.*", "blocks.{i}.attn.q_norm.*"),
    TensorRule("encoder.blocks.{i}.attention.k_norm.*", "blocks.{i}.attn.k_norm.*"),
    TensorRule("encoder.blocks.{i}.attention.norm.*", "blocks.{i}.attn.norm.*"),
    TensorRule("encoder.blocks.{i}.attention.out.*", "blocks.{i}.attn.proj.*"),
    TensorRule("encoder.blocks.{i}.attention.relative_bias.table", "blocks.{i}.attn.relative_position_bias_table"),
    TensorRule("encoder.blocks.{i}.norm2.*", "blocks.{i}.norm2.*"),
    TensorRule("encoder.blocks.{i}.mlp.norm.*", "blocks.{i}.mlp.norm.*"),
    TensorRule("encoder.blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.fc2.*"),
]
FUSED_QKV = [
    TensorRule("encoder.blocks.{i}.attention.qkv.*", "blocks.{i}.attn.qkv.*"),
    TensorRule("encoder.blocks.{i}.attention.q_bias", "blocks.{i}.attn.q_bias"),
    TensorRule("encoder.blocks.{i}.attention.v_bias", "blocks.{i}.attn.v_bias"),
]
SPLIT_QKV = [
    TensorRule(
        "encoder.blocks.{i}.attention.qkv.*", [f"blocks.{{i}}.attn.{part}_proj.*" for part in "qkv"], split_into(3)
    ),
    TensorRule("encoder.blocks.{i}.attention.q_bias", "blocks.{i}.attn.q_proj.bias"),
    TensorRule("encoder.blocks.{i}.attention.v_bias", "blocks.{i}.attn.v_proj.bias"),
]
PACKED_GATE = [TensorRule("encoder.blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.fc1.*")]
SPLIT_GATE = [
    TensorRule("encoder.blocks.{i}.mlp.fc1.*", [f"blocks.{{i}}.mlp.fc1_{part}.*" for part in "gx"], split_into(2))
]
AROUND = [
    TensorRule("patch_embed.projection.bias", "patch_embed.proj.bias"),
    TensorRule("patch_norm.*", "patch_embed.norm.*"),
    TensorRule("class_token", "cls_token", ADD_BATCH_AXIS),
    TensorRule("position_embedding.0.table", "pos_embed", ADD_BATCH_AXIS),
    TensorRule("relative_bias.table", SHARED_TABLE),
    TensorRule("rotary.frequencies", "rope.freqs"),
    TensorRule("input_norm.*", "norm_pre.*"),
    TensorRule("encoder.norm.*", "norm.*"),
    TensorRule("pool_norm.*", "fc_norm.*"),
    TensorRule("pool.query", "attn_pool.latent", ADD_BATCH_AXIS),
    TensorRule("pool.q.*", "attn_pool.q.*"),
    TensorRule("pool.kv.*", "attn_pool.kv.*"),
    TensorRule("pool.out.*", "attn_pool.proj.*"),
    TensorRule("pool.norm.*", "attn_pool.norm.*"),
    TensorRule("pool.mlp.fc1.*", "attn_pool.mlp.fc1.*"),
    TensorRule("pool.mlp.fc2.*", "attn_pool.mlp.fc2.*"),
    TensorRule("head.*", "head.*"),
    TensorRule("head.linear.*", "head.*"),
    TensorRule("head.distilled.*", "head_dist.*"),
    TensorRule("head.hidden.*", "pre_logits.fc.*"),
]


def list_vit_rules(a: VitArchitecture, dialect: str) -> list[TensorRule]:
    """Return the rules for a Vision Transformer; `dialect` is a release, and `split-qkv` and `split-gate` behind it."""
    release, *words = dialect.split("+")
    channels = a.backbone.out_channels if a.backbone else a.in_channels
    registers = REGISTERS.get("distilled" if a.pool == "distilled" else release, "reg_token")
    return [
        TensorRule("patch_embed.projection.weight", "patch_embed.proj.weight", to_patch_kernel(channels, a.patch_size)),
        TensorRule("registers", registers, ADD_BATCH_AXIS),
        TensorRule("encoder.blocks.{i}.scale1.factor", _name_scale(release, 1)),
        TensorRule("encoder.blocks.{i}.scale2.factor", _name_scale(release, 2)),
        *(SPLIT_QKV if "split-qkv" in words else FUSED_QKV),
        *(SPLIT_GATE if "split-gate" in words else PACKED_GATE),
        *BLOCK,
        *AROUND,
        *(list_backbone_rules(a.backbone, IN_HYBRID) if a.backbone else []),
    ]
