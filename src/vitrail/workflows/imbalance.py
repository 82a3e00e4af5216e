"""Look at how many images the classes have, and choose whether rare classes should count more than they would alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from vitrail.data.balance import count_classes
from vitrail.data.open import Data, open_training_images
from vitrail.data.sources.source import name_class
from vitrail.objectives.balance import BalanceKind
from vitrail.system.events import OnEvent
from vitrail.system.results import format_count
from vitrail.training.config import RunConfig
from vitrail.training.resolve import change_config

LEAST_RATIO = 10.0
"""Classes are balanced if the largest has so many times the images of the smallest."""
CHOSEN: BalanceKind = "logits"
CHOSEN_SHARE = 0.5
"""How they are balanced: `data.balance`, and `objective.balance` for what that leaves uneven. On long-tailed CIFAR-10
both together found the most; see docs/training.md."""


@dataclass(frozen=True)
class BalanceChoice:
    """What the counts of the classes call for."""

    ratio: float
    """Images of the largest class for each image of the smallest."""
    balance: BalanceKind
    """The value for `objective.balance`."""
    share: float
    """The value for `data.balance`."""
    why: str
    """A sentence that says what was chosen and why."""


def choose_balance(counts: Sequence[int], names: Sequence[str] = ()) -> BalanceChoice:
    """Choose by the number of training images of each class. Classes without an image are left aside.

    Args:
        counts: the training images of each class.
        names: of the classes; their numbers if empty.
    """
    present = [label for label, count in enumerate(counts) if count]
    if len(present) < 2:
        return BalanceChoice(1.0, "none", 0.0, "there are no classes of different sizes")
    rare, common = min(present, key=counts.__getitem__), max(present, key=counts.__getitem__)
    ratio = counts[common] / counts[rare]
    if ratio < LEAST_RATIO:
        why = f"the largest class has {ratio:.1f} times as many images as the smallest: every image counts the same"
        return BalanceChoice(ratio, "none", 0.0, why)

    def name(label: int) -> str:
        return names[label] if names else f"class {label}"

    sizes = f"{name(rare)} has {format_count(counts[rare], 'image')} and {name(common)} {counts[common]:,}"
    why = (
        f"{sizes}, {ratio:.0f} times as many: rare classes will count as much as common ones, which usually finds "
        "more of them and a little less of the common ones (objective.balance=none turns this off)"
    )
    return BalanceChoice(ratio, CHOSEN, CHOSEN_SHARE, why)


def apply_balance(config: RunConfig, data: Data, given_keys: Collection[str], listener: OnEvent) -> RunConfig:
    """Return the configuration with what the classes of the data call for, and send it as a `balance` event.

    Nothing changes, and nothing is sent, if the user has set `objective.balance` or `data.balance`, if classes are of
    similar sizes, or for another objective than one class of many.
    """
    if "balance" in given_keys or config.objective.kind != "classification" or config.objective.loss != "softmax":
        return config
    source = open_training_images(data)
    choice = choose_balance(count_classes(source), [name_class(source, label) for label in range(source.num_classes)])
    if choice.balance == "none":
        return config
    send_choice(choice, listener)
    return change_config(config, {"objective": {"balance": choice.balance}, "data": {"balance": choice.share}})


def send_choice(choice: BalanceChoice, listener: OnEvent) -> None:
    """Send a choice as a `balance` event."""
    listener("balance", {"ratio": choice.ratio, "choice": choice.balance, "share": choice.share, "why": choice.why})


def choose_head_balance(
    config: RunConfig, given_keys: Collection[str], counts: Sequence[int], names: Sequence[str], listener: OnEvent
) -> float:
    """Return how far a head fitted in closed form should expect every class equally often; send it if it was chosen.

    The user's `objective.balance` wins; else the counts of the classes decide.
    """
    if "balance" not in given_keys and (choice := choose_balance(counts, names)).balance != "none":
        send_choice(replace(choice, share=0.0), listener)
        return config.objective.balance_strength
    return get_head_balance(config)


def get_head_balance(config: RunConfig) -> float:
    """Return how far a head that a training starts from should expect every class equally often: 0 as in the data.

    It is then about what the training would make of the head.
    """
    return config.data.balance if config.objective.balance == "none" else config.objective.balance_strength
