"""`TimmModel`: any network of timm, used through the same interface as vitrail's own models.

Nothing is downloaded here. A network is built by its name, without values; weights/load.py fills it.
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
"""A network for one image size can be resized up to this factor. Window tables grow with the fourth power of a side,
and an untrusted config.json could ask for any size."""


class TimmModel(ImageModel):
    """An image classifier of timm; `peer` is timm's network, whose forward pass runs unchanged."""

    architecture: TimmArchitecture  # type: ignore[assignment]  # no other weight format can hold it

    def __init__(self, architecture: TimmArchitecture) -> None:
        super().__init__(architecture)  # type: ignore[arg-type]
        self.peer = build_empty_network(architecture)
        self.gradient_checkpointing = False

    @property
    def head(self) -> nn.Module:  # type: ignore[override]  # a second name would save it twice
        """timm's classifier, one layer in nearly all networks. Its input may differ from what `embed` returns."""
        classifier = self.peer.get_classifier()
        return classifier if isinstance(classifier, nn.Module) else nn.ModuleList(classifier)

    def build_head(self) -> nn.Module:
        """Return the head, which timm builds with the network."""
        return self.head

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → the features before pooling, in the shape of timm's network."""
        self.check_images(images)
        features: Tensor = self.peer.forward_features(images)
        return features

    def pool_features(self, features: Tensor) -> Tensor:
        """The result of `forward_features` → (B, D): the input of the last layer of timm's head."""
        return self.forward_head(features, pre_logits=True)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """The result of `forward_features` → logits (B, K), or the input of the last layer with `pre_logits`."""
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
        target = TimmArchitecture(**{**dict(self.architecture), "num_classes": num_classes})
        self._change_network(target, lambda network: network.reset_classifier(num_classes))
        self.initialise_head()
        self.labels, self.stored_task, self.reliability = labels, None, None
        return self

    @torch.no_grad()
    def initialise_head(self, bias: float = 0.0) -> None:
        """Set the layers that compute the logits to zero, and their biases to `bias`."""
        for layer in find_output_layers(self.head, self.num_classes):
            init.zeros_(layer.weight)
            if layer.bias is not None:
                init.constant_(layer.bias, bias)

    def resize(self, image_size: int | tuple[int, int]) -> Self:
        """Change the image size as timm does; raise a ConfigError if the network does not run at that size."""
        target = self.architecture.copy_at_size(image_size)
        measure_cost(target)
        if target.image_size != self.image_size and hasattr(self.peer, "set_input_size"):
            self._change_network(target, lambda network: network.set_input_size(img_size=target.image_size))
        self.architecture = target
        self._prepare_at_own_size()
        return self

    def set_gradient_checkpointing(self, enabled: bool = True) -> None:
        """Set it for the blocks that timm chooses; raise a ConfigError if timm has none for this network."""
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
        """Image pixels for each pixel of the last feature map; 32 if timm does not say."""
        stages = getattr(self.peer, "feature_info", None) or [{}]
        return int(stages[-1].get("reduction", 32))

    def share_batch_statistics(self, device: torch.device) -> None:
        """Compute batch norm over all ranks, with timm's conversion: torch's would drop the activations."""
        name = self.architecture.name
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.modules()):
            if device.type != "cuda":
                raise ConfigError(f"the batch norm of {name} needs GPUs to be trained on several ranks")
            self.peer = import_timm(f"training {name}").layers.convert_sync_batchnorm(self.peer)

    def count_layers_above(self) -> dict[str, int]:
        """Return for each parameter the number of layers between it and the logits, by timm's grouping."""
        if not hasattr(self.peer, "group_matcher"):
            raise ConfigError(f"timm does not group the layers of {self.architecture.name}: leave layer_decay out")
        timm = import_timm(f"training {self.architecture.name}")
        layer = timm.models.group_parameters(self.peer, self.peer.group_matcher(coarse=False), reverse=True)
        return {f"peer.{name}": max(layer.values()) - number for name, number in layer.items()}

    def _change_network(self, target: TimmArchitecture, change: Callable[[Any], object]) -> None:
        """Change the network with timm's own method, then move its tensors into a newly built one.

        A saved model is built anew when it is loaded, so both ways must give the same network.
        """
        trial, fresh = build_empty_network(self.architecture), build_empty_network(target)
        with torch.device("meta"):
            change(trial)
        if _shapes(trial) != _shapes(fresh):
            raise ConfigError(
                f"timm does not change {self.architecture.name} into what it builds with {target.num_classes} classes "
                f"for images of {show_size(target.image_size)} pixels: load it anew, and ask for that there"
            )
        like = next(self.parameters())
        with like.device, torch.no_grad():
            change(self.peer)
        fresh.load_state_dict(self.peer.state_dict(), assign=True)
        self.peer = fresh.to(like).train(self.training)
        if self.gradient_checkpointing:
            fresh.set_grad_checkpointing(True)
        self.architecture = target


def find_output_layers(head: nn.Module, num_classes: int) -> list[nn.Linear | nn.Conv2d]:
    """Return the layers of a classifier that compute logits.

    Of several layers in a row this is the last; of several classifiers (distillation), the last of each.
    """
    if isinstance(head, nn.Linear | nn.Conv2d):
        return [head] if len(head.weight) == num_classes else []
    inner = [(child, find_output_layers(child, num_classes)) for child in head.children()]
    row = [child for child, layers in inner if layers == [child]]
    hidden = [] if isinstance(head, nn.ModuleList) else row[:-1]
    return [layer for child, layers in inner if child not in hidden for layer in layers]


def import_timm(purpose: str) -> Any:
    """Return the timm library; raise an error with the reason if it cannot be imported."""
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
    """Build timm's network on the meta device, without memory or values."""
    network = _create_network(architecture, "meta")
    network.register_load_state_dict_post_hook(functools.partial(_fill_missing_buffers, architecture=architecture))
    return network


def _create_network(a: TimmArchitecture, device: str) -> Any:
    """Let timm build the network of that name, then change its head, then its image size."""
    timm = import_timm(f"the model {a.name}")
    if not timm.is_model(a.name):
        hint = did_you_mean(a.name.partition(".")[0], timm.list_models()) or ": timm.list_models() lists them"
        raise ConfigError(f"timm {timm.__version__} has no model {a.name!r}{hint}")
    rates = {"drop_rate": a.dropout, "drop_path_rate": a.stochastic_depth}
    try:
        with torch.device(device), torch.random.fork_rng(devices=[]):
            network = timm.create_model(a.name, pretrained=False, in_chans=a.in_channels, **rates)
            if not all(hasattr(network, part) for part in ("forward_head", "get_classifier", "reset_classifier")):
                raise ValueError("it is no classifier")
            if a.num_classes != network.num_classes:
                network.reset_classifier(a.num_classes)
            own = read_native_size(network)
            if a.image_size != own and hasattr(network, "set_input_size"):
                if max(a.image_size) > MAX_GROWTH * max(own):
                    raise ValueError(f"it is made for images of {show_size(own)} pixels")
                network.set_input_size(img_size=a.image_size)
    except Exception as error:  # whatever timm's many builders raise
        rest = "".join(f", {name} {value}" for name, value in rates.items() if value is not None)
        raise ConfigError(
            f"timm {timm.__version__} cannot build {a.name} for images of {a.in_channels} × {show_size(a.image_size)} "
            f"with {a.num_classes} classes{rest}: {_first_line(error)}"
        ) from None
    return network


def _fill_missing_buffers(network: nn.Module, _: object, architecture: TimmArchitecture) -> None:
    """Compute the buffers that no checkpoint stores, after the weights were loaded.

    They need a network with memory. The weights already take as much, so a small file cannot force a large allocation.
    """
    like = next(network.parameters())
    empty = [name for name, buffer in network.named_buffers() if buffer.is_meta]
    if empty and not like.is_meta:
        whole = _create_network(architecture, "cpu")
        for name in empty:
            owner, _, last = name.rpartition(".")
            setattr(network.get_submodule(owner), last, whole.get_buffer(name))
    network.to(like.dtype)  # buffers too, as for every model that changes its type


@functools.lru_cache(maxsize=32)
def measure_cost(architecture: TimmArchitecture) -> tuple[int, int]:
    """Return the parameters, and the operations of one image (convolutions and matrix products, counted by torch).

    The network runs on the meta device; a ConfigError says if it does not run at its image size.
    """
    # Without gradients: torch's counter fails for some networks that need them.
    network = build_empty_network(architecture).eval().requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        _run_empty(network, architecture, 1)
    return sum(parameter.numel() for parameter in network.parameters()), counter.get_total_flops()


@functools.lru_cache(maxsize=32)
def measure_activation_bytes(architecture: TimmArchitecture) -> int:
    """Return the bytes that a float32 training step stores for the backward pass of one image.

    Attention maps are included, although fused kernels do not store them.
    """
    network = build_empty_network(architecture).train()
    constant = {_storage(tensor) for tensor in [*network.parameters(), *network.buffers()]}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in constant:
            saved[_storage(tensor)] = tensor  # a reference, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        _run_empty(network, architecture, 2)  # two images, because batch norm cannot train on one
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) // 2


def _run_empty(network: nn.Module, a: TimmArchitecture, images: int) -> None:
    try:
        network(torch.empty(images, a.in_channels, *a.image_size, device="meta"))
    except Exception as error:  # whatever its layers raise
        raise ConfigError(
            f"timm's {a.name} does not run at image size {show_size(a.image_size)} ({_first_line(error)}): its own is "
            f"{show_size(read_native_size(network))}"
        ) from None


def read_native_size(network: Any) -> tuple[int, int]:
    """Return the height and width that timm builds a network for."""
    height, width = network.pretrained_cfg["input_size"][1:]
    return height, width


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
