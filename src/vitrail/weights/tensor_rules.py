"""How our tensors and another naming's hold the same numbers: renamed, reshaped, transposed, split or joined.

A naming is a table of lines. Each line pairs a pattern of our names with one of theirs and a rule, which works both
ways and changes no number: so a checkpoint that goes in and comes out again is the same to the bit. Applied to
tensors without memory, the rules also say which shapes a file must have before any of it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.weights.files import TensorInfo


class Transform(NamedTuple):
    """Theirs → ours, and ours → theirs."""

    inward: Callable[[Sequence[Tensor]], Tensor]
    outward: Callable[[Tensor], Sequence[Tensor]]


UNCHANGED = Transform(lambda parts: parts[0], lambda ours: [ours])
ADD_BATCH_AXIS = Transform(lambda parts: parts[0].squeeze(0), lambda ours: [ours.unsqueeze(0)])
"""(T, D) here, (1, T, D) there."""


def split_into(count: int) -> Transform:
    """One tensor here, so many equal parts of it there: fused qkv against q, k and v."""
    return Transform(lambda parts: torch.cat(list(parts)), lambda ours: ours.chunk(count))


def to_patch_kernel(channels: int, side: int) -> Transform:
    """A linear map of flattened patches here, a convolution kernel there."""
    return Transform(lambda parts: parts[0].flatten(1), lambda ours: [ours.unflatten(1, (channels, side, side))])


class TensorRule(NamedTuple):
    """One line of a naming. `{i}` stands for a number, `*` for weight or bias, `**` for any name."""

    ours: str
    theirs: str | Sequence[str]
    rule: Transform = UNCHANGED


@dataclass(frozen=True)
class TensorMatch:
    """One tensor of ours and those of theirs that hold its numbers."""

    ours: str
    theirs: tuple[str, ...]
    rule: Transform


def match_tensors(names: Iterable[str], table: Sequence[TensorRule]) -> list[TensorMatch]:
    """A pair for each of our names; a WeightsError for those that the naming has no word for."""
    patterns = [(_compile_pattern(line.ours), line) for line in table]
    pairs, nameless = [], []
    for name in names:
        for pattern, line in patterns:
            if found := pattern.fullmatch(name):
                theirs = [line.theirs] if isinstance(line.theirs, str) else line.theirs
                pairs.append(TensorMatch(name, tuple(_fill_pattern(word, found) for word in theirs), line.rule))
                break
        else:
            nameless.append(name)
    if nameless:
        raise WeightsError(f"this naming has no place for {shorten_list(nameless)}")
    return pairs


def _compile_pattern(words: str) -> re.Pattern[str]:
    words = re.escape(words).replace(r"\*\*", r"(?P<any>.+)").replace(r"\*", r"(?P<kind>weight|bias)")
    return re.compile(words.replace(r"\{i\}", r"(?P<i>\d+)"))


def _fill_pattern(words: str, found: re.Match[str]) -> str:
    groups = {key: value or "" for key, value in found.groupdict().items()}
    words = words.replace("**", groups.get("any", "")).replace("*", groups.get("kind", ""))
    return words.replace("{i}", groups.get("i", ""))


def add_prefix(lines: Iterable[TensorRule], prefix: str) -> list[TensorRule]:
    """The same lines with something before all of their names."""
    return [
        TensorRule(ours, prefix + theirs if isinstance(theirs, str) else [prefix + word for word in theirs], rule)
        for ours, theirs, rule in lines
    ]


def compute_file_shapes(pairs: Sequence[TensorMatch], ours: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes a file must have, from tensors of ours that may be without memory."""
    expected: dict[str, tuple[int, ...]] = {}
    for pair in pairs:
        parts = pair.rule.outward(ours[pair.ours])
        expected.update((name, tuple(part.shape)) for name, part in zip(pair.theirs, parts, strict=True))
    return expected


def check_complete(
    where: str, found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], set_aside: Iterable[str]
) -> None:
    """Raise a WeightsError that lists everything missing, left over, misshapen or not a number, if anything is."""
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing: {shorten_list(missing)}")
    known = {*expected, *set_aside}
    if left_over := [name for name in found if name not in known]:
        problems.append(f"left over: {shorten_list(left_over)}")
    misshapen = [
        f"{name} is {found[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if misshapen:
        problems.append(f"wrong shape: {shorten_list(misshapen)}")
    counters = [name for name in expected if name.endswith("num_batches_tracked")]
    integers = [n for n in expected if n in found and n not in counters and not found[n].dtype.is_floating_point]
    if integers:
        problems.append(f"not floating point: {shorten_list(integers)}")
    if problems:
        raise WeightsError(f"{where} does not hold the model it describes; " + "; ".join(problems))


def shorten_list(names: Sequence[str], most: int = 6) -> str:
    """The first few, and how many more."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
