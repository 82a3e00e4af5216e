"""Networks of timm's as models: what vitrail has no layers for goes through the same commands.

Nothing is downloaded here. A network is built empty, by its name, and filled by what loads weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import show_size
from vitrail.errors import ConfigError, MissingExtraError, WeightsError, did_you_mean
from vitrail.model.architecture import TimmArchitecture
from vitrail.model.base import ImageModel, check_labels

MAX_GROWTH = 4
"""A network that is built for one size can be resized to so many times it: tables of windows grow with the fourth
power of a side, and a stranger's config.json could ask for any."""


class TimmModel(ImageModel):
    """Any image classifier of timm's; its forward pass is timm's own."""

    architecture: TimmArchitecture  # type: ignore[assignment]  # the one that no other naming has words for

    def __init__(self, architecture: TimmArchitecture) -> None:
        super().__init__(architecture)  # type: ignore[arg-type]
        self.peer = build_empty_network(architecture)
        self.gradient_checkpointing = False

    @property
    def head(self) -> nn.Module:  # type: ignore[override]  # a second name would save it twice
        """timm's classifier, a part of its network: one layer in nearly all. It need not take what `embed` gives."""
        classifier = self.peer.get_classifier()
        return classifier if isinstance(classifier, nn.Module) else nn.ModuleList(classifier)

    def build_head(self) -> nn.Module:
        """Built with the network."""
        return self.head

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → what timm computes before pooling, in the form of the network."""
        self.check_images(images)
        features: Tensor = self.peer.forward_features(images)
        return features

    def pool_features(self, features: Tensor) -> Tensor:
        """The result of `forward_features` → (B, D): what timm gives to the last layer of its head."""
        return self.forward_head(features, pre_logits=True)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """timm's own."""
        result: Tensor = self.peer.forward_head(features, pre_logits=pre_logits)
        return result

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W), normalised as `preprocessing` says → (B, K) logits, as timm computes them."""
        self.check_images(images)
        logits: Tensor = self.peer(images)
        return logits

    def replace_head(self, num_classes: int, labels: Sequence[str] | None = None) -> Self:
        """Give timm's network a new classifier, whose last layer starts at zero."""
        check_labels(labels, num_classes)
        wanted = TimmArchitecture(**{**dict(self.architecture), "num_classes": num_classes})
        self._become(wanted, lambda network: network.reset_classifier(num_classes))
        self.initialise_head()
        self.labels = labels
        return self

    @torch.no_grad()
    def initialise_head(self, bias: float = 0.0) -> None:
        """Zero the layers that give logits; a constant in their bias."""
        for layer in find_output_layers(self.head, self.num_classes):
            init.zeros_(layer.weight)
            if layer.bias is not None:
                init.constant_(layer.bias, bias)

    def resize(self, image_size: int | tuple[int, int]) -> Self:
        """As timm does it, where the network has something that is made for one size; a ConfigError where it cannot."""
        wanted = self.architecture.copy_at_size(image_size)
        measure_cost(wanted)
        if wanted.image_size != self.image_size and hasattr(self.peer, "set_input_size"):
            self._become(wanted, lambda network: network.set_input_size(img_size=wanted.image_size))
        self.architecture = wanted
        self.preprocessing = self.preprocessing.model_copy(update={"image_size": self.image_size})
        return self

    def set_gradient_checkpointing(self, enabled: bool = True) -> None:
        """For the blocks that timm chooses."""
        if enabled == self.gradient_checkpointing:
            return
        try:
            self.peer.set_grad_checkpointing(enabled)
        except (AssertionError, AttributeError):
            name = self.architecture.name
            raise ConfigError(f"timm has no gradient checkpointing for {name}: leave it off") from None
        self.gradient_checkpointing = enabled

    @property
    def stride(self) -> int:
        """Image pixels for each pixel of the last feature map; 32 where timm does not say."""
        stages = getattr(self.peer, "feature_info", None) or [{}]
        return int(stages[-1].get("reduction", 32))

    def share_batch_statistics(self, device: torch.device) -> None:
        """Batch norm over the batches of all ranks. Torch's own conversion would lose the activations in timm's."""
        name = self.architecture.name
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.modules()):
            if device.type != "cuda":
                raise ConfigError(f"the batch norm of {name} needs GPUs to be trained on several ranks")
            self.peer = import_timm(f"training {name}").layers.convert_sync_batchnorm(self.peer)

    def count_layers_above(self) -> dict[str, int]:
        """How many layers lie between each parameter and the logits, by timm's grouping; 0 for the head."""
        if not hasattr(self.peer, "group_matcher"):
            raise ConfigError(f"timm does not tell the layers of {self.architecture.name}: leave layer_decay out")
        timm = import_timm(f"training {self.architecture.name}")
        layer = timm.models.group_parameters(self.peer, self.peer.group_matcher(coarse=False), reverse=True)
        return {f"peer.{name}": max(layer.values()) - number for name, number in layer.items()}

    def _become(self, wanted: TimmArchitecture, change: Callable[[Any], object]) -> None:
        """Change the network as timm does, then put its tensors into one that is built so from the start: what is
        built again after saving must be the same, whatever way led here."""
        trial, fresh = build_empty_network(self.architecture), build_empty_network(wanted)
        with torch.device("meta"):
            change(trial)
        if _shapes(trial) != _shapes(fresh):
            raise ConfigError(
                f"timm does not change {self.architecture.name} into what it builds with {wanted.num_classes} classes "
                f"for images of {show_size(wanted.image_size)} pixels: load it anew, and ask for that there"
            )
        like = next(self.parameters())
        with like.device, torch.no_grad():
            change(self.peer)
        fresh.load_state_dict(self.peer.state_dict(), assign=True)
        self.peer = fresh.to(like).train(self.training)
        if self.gradient_checkpointing:
            fresh.set_grad_checkpointing(True)
        self.architecture = wanted


def find_output_layers(head: nn.Module, num_classes: int) -> list[nn.Linear | nn.Conv2d]:
    """The layers of a classifier that give logits: of layers in a row the last, for the others are hidden; of several
    classifiers, as distillation has them, each one's."""
    if isinstance(head, nn.Linear | nn.Conv2d):
        return [head] if len(head.weight) == num_classes else []
    inner = [(child, find_output_layers(child, num_classes)) for child in head.children()]
    row = [child for child, found in inner if found == [child]]
    hidden = [] if isinstance(head, nn.ModuleList) else row[:-1]
    return [layer for child, found in inner if child not in hidden for layer in found]


def import_timm(purpose: str) -> Any:
    """The library."""
    try:
        import timm
    except ImportError:
        raise MissingExtraError(purpose, "timm") from None
    except RuntimeError as error:
        raise WeightsError(
            f"{purpose}: timm is installed but cannot be imported ({error}); torch and torchvision must be of one kind"
        ) from None
    return timm


def build_empty_network(architecture: TimmArchitecture) -> Any:
    """timm's network, empty: on the meta device, without memory or values."""
    built = _create_network(architecture, "meta")
    built.register_load_state_dict_post_hook(functools.partial(_fill_missing_buffers, architecture=architecture))
    return built


def _create_network(a: TimmArchitecture, device: str) -> Any:
    """As timm makes it: the network of that name, then its head changed, then its size."""
    timm = import_timm(f"the model {a.name}")
    if not timm.is_model(a.name):
        hint = did_you_mean(a.name.partition(".")[0], timm.list_models()) or ": timm.list_models() lists them"
        raise ConfigError(f"timm {timm.__version__} has no model {a.name!r}{hint}")
    rates = {"drop_rate": a.dropout, "drop_path_rate": a.stochastic_depth}
    try:
        with torch.device(device), torch.random.fork_rng(devices=[]):
            built = timm.create_model(a.name, pretrained=False, in_chans=a.in_channels, **rates)
            if not all(hasattr(built, part) for part in ("forward_head", "get_classifier", "reset_classifier")):
                raise ValueError("it is no classifier")
            if a.num_classes != built.num_classes:
                built.reset_classifier(a.num_classes)
            own = read_native_size(built)
            if a.image_size != own and hasattr(built, "set_input_size"):
                if max(a.image_size) > MAX_GROWTH * max(own):
                    raise ValueError(f"it is made for images of {show_size(own)} pixels")
                built.set_input_size(img_size=a.image_size)
    except Exception as error:  # whatever timm's many builders raise
        rest = "".join(f", {name} {value}" for name, value in rates.items() if value is not None)
        raise ConfigError(
            f"timm {timm.__version__} cannot build {a.name} for images of {a.in_channels} × {show_size(a.image_size)} "
            f"with {a.num_classes} classes{rest}: {_first_line(error)}"
        ) from None
    return built


def _fill_missing_buffers(built: nn.Module, _: object, architecture: TimmArchitecture) -> None:
    """After filling: buffers that are in no checkpoint get their values, which only a network with memory has. By now
    the weights take as much, so no small file can ask for it."""
    like = next(built.parameters())
    empty = [name for name, buffer in built.named_buffers() if buffer.is_meta]
    if empty and not like.is_meta:
        whole = _create_network(architecture, "cpu")
        for name in empty:
            owner, _, last = name.rpartition(".")
            setattr(built.get_submodule(owner), last, whole.get_buffer(name))
    built.to(like.dtype)  # buffers too, as in every model that changes its type


@functools.lru_cache(maxsize=32)
def measure_cost(architecture: TimmArchitecture) -> tuple[int, int]:
    """Parameters, and operations in a forward pass of one image: those of convolutions and matrix products, which torch
    counts while the network runs without memory. A ConfigError where it does not run at its size."""
    built = (
        build_empty_network(architecture).eval().requires_grad_(False)
    )  # torch's counter stumbles over some that need gradients
    with FlopCounterMode(display=False) as counter:
        _run_empty(built, architecture, 1)
    return sum(parameter.numel() for parameter in built.parameters()), counter.get_total_flops()


@functools.lru_cache(maxsize=32)
def measure_activation_bytes(architecture: TimmArchitecture) -> int:
    """Bytes in float32 that a training step keeps of one image for the backward pass. Attention maps are counted, which
    fused kernels do not keep."""
    built = build_empty_network(architecture).train()
    constant = {_storage(tensor) for tensor in [*built.parameters(), *built.buffers()]}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in constant:
            kept[_storage(tensor)] = tensor  # held, so that no other takes its place in memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _run_empty(built, architecture, 2)  # two, for batch norm cannot train on one
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) // 2


def _run_empty(built: nn.Module, a: TimmArchitecture, images: int) -> None:
    try:
        built(torch.empty(images, a.in_channels, *a.image_size, device="meta"))
    except Exception as error:  # whatever its layers raise
        raise ConfigError(
            f"timm's {a.name} does not run at image size {show_size(a.image_size)} ({_first_line(error)}): its own is "
            f"{show_size(read_native_size(built))}"
        ) from None


def read_native_size(built: Any) -> tuple[int, int]:
    """Height and width that timm builds a network for."""
    height, width = built.pretrained_cfg["input_size"][1:]
    return height, width


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
