"""Rules that rename and reshape tensors between vitrail's names ("ours") and another format's ("theirs").

Each file in formats/ lists its rules. A rule works in both directions and changes no number, so a checkpoint that is
loaded and written again is the same to the bit. Applied to tensors without memory, the rules also give the shapes
that a file must have, before any of it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import WeightsError, escape_unprintable
from vitrail.weights.files import TensorInfo


class Transform(NamedTuple):
    """How the tensors of a file become one of vitrail's (`to_ours`), and the way back (`to_theirs`)."""

    to_ours: Callable[[Sequence[Tensor]], Tensor]
    to_theirs: Callable[[Tensor], Sequence[Tensor]]


UNCHANGED = Transform(lambda parts: parts[0], lambda ours: [ours])
ADD_BATCH_AXIS = Transform(lambda parts: parts[0].squeeze(0), lambda ours: [ours.unsqueeze(0)])
"""(T, D) in vitrail, (1, T, D) in the file."""


def split_into(count: int) -> Transform:
    """One tensor in vitrail is `count` equal parts in the file: fused qkv is stored as q, k and v."""
    return Transform(lambda parts: torch.cat(list(parts)), lambda ours: ours.chunk(count))


def to_patch_kernel(channels: int, side: int) -> Transform:
    """The patch projection is a linear layer in vitrail and a convolution kernel in the file."""
    return Transform(lambda parts: parts[0].flatten(1), lambda ours: [ours.unflatten(1, (channels, side, side))])


class TensorRule(NamedTuple):
    """A pattern of our names and those of theirs: `{i}` is a number, `*` is weight or bias, `**` is any name."""

    ours: str
    theirs: str | Sequence[str]
    transform: Transform = UNCHANGED
    rows: tuple[int, int] | None = None
    """The rows, from and up to, of the file's tensor that hold ours, if several of ours are stored in one of theirs."""


@dataclass(frozen=True)
class TensorMatch:
    """One tensor of ours, and the tensors of theirs that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform
    rows: tuple[int, int] | None = None

    def to_ours(self, parts: Sequence[Tensor]) -> Tensor:
        """Return our tensor from those of the file."""
        if self.rows is not None:
            parts = [part[slice(*self.rows)] for part in parts]
        return self.transform.to_ours(parts)


def match_tensors(names: Iterable[str], rules: Sequence[TensorRule]) -> list[TensorMatch]:
    """Apply the first rule that fits to each of our names; raise a WeightsError if a name fits no rule."""
    patterns = [(_compile_pattern(rule.ours), rule) for rule in rules]
    matches, nameless = [], []
    for name in names:
        for pattern, rule in patterns:
            if hit := pattern.fullmatch(name):
                theirs = [rule.theirs] if isinstance(rule.theirs, str) else rule.theirs
                names_in_file = tuple(_fill_pattern(word, hit) for word in theirs)
                matches.append(TensorMatch(name, names_in_file, rule.transform, rule.rows))
                break
        else:
            nameless.append(name)
    if nameless:
        raise WeightsError(f"this format has no place for {shorten_list(nameless)}")
    return matches


def _compile_pattern(words: str) -> re.Pattern[str]:
    words = re.escape(words).replace(r"\*\*", r"(?P<any>.+)").replace(r"\*", r"(?P<kind>weight|bias)")
    return re.compile(words.replace(r"\{i\}", r"(?P<i>\d+)"))


def _fill_pattern(words: str, hit: re.Match[str]) -> str:
    groups = {key: value or "" for key, value in hit.groupdict().items()}
    words = words.replace("**", groups.get("any", "")).replace("*", groups.get("kind", ""))
    return words.replace("{i}", groups.get("i", ""))


def add_prefix(rules: Iterable[TensorRule], prefix: str) -> list[TensorRule]:
    """Return the rules with `prefix` before each of their names."""
    return [
        rule._replace(
            theirs=prefix + rule.theirs if isinstance(rule.theirs, str) else [prefix + word for word in rule.theirs]
        )
        for rule in rules
    ]


def compute_file_shapes(matches: Sequence[TensorMatch], ours: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a file must have, by name; `ours` may be on the meta device."""
    return {name: tuple(tensor.shape) for name, tensor in convert_to_theirs(matches, ours).items()}


def convert_to_theirs(matches: Sequence[TensorMatch], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file, by name; those of ours that are stored in one tensor are joined by rows."""
    theirs: dict[str, Tensor] = {}
    for match in sorted(matches, key=lambda match: match.rows or (0, 0)):
        for name, part in zip(match.theirs, match.transform.to_theirs(ours[match.ours]), strict=True):
            theirs[name] = _append_rows(theirs.get(name), part, match.rows)
    return theirs


def _append_rows(before: Tensor | None, part: Tensor, rows: tuple[int, int] | None) -> Tensor:
    """Return the rows so far and those of `part` behind them; rows between the two that no tensor has are 0."""
    if rows is None:
        return part
    before = part[:0] if before is None else before
    between = part.new_zeros(rows[0] - before.shape[0], *part.shape[1:])
    return torch.cat([before, between, part])


def find_lost_rows(matches: Sequence[TensorMatch], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with values in rows that no tensor of the model takes."""
    lost = []
    for name, tensor in tensors.items():
        left = torch.ones(len(tensor), dtype=torch.bool)
        for match in matches:
            if match.rows is not None and name in match.theirs:
                left[slice(*match.rows)] = False
        if bool(tensor[left].any()):
            lost.append(name)
    return sorted(lost)


def check_complete(
    where: str, tensors: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], others: Iterable[str]
) -> None:
    """Raise a WeightsError that lists all missing, unknown, misshapen and non-floating-point tensors.

    Args:
        where: the source, for the message.
        tensors: what the file holds.
        expected: the shapes that it must have.
        others: names that may be there besides.
    """
    problems = []
    if missing := [name for name in expected if name not in tensors]:
        problems.append(f"missing: {shorten_list(missing)}")
    known = {*expected, *others}
    if left_over := [name for name in tensors if name not in known]:
        problems.append(f"left over: {shorten_list(left_over)}")
    misshapen = [
        f"{name} is {tensors[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if misshapen:
        problems.append(f"wrong shape: {shorten_list(misshapen)}")
    counters = [name for name in expected if name.endswith("num_batches_tracked")]
    integers = [n for n in expected if n in tensors and n not in counters and not tensors[n].dtype.is_floating_point]
    if integers:
        problems.append(f"not floating point: {shorten_list(integers)}")
    if problems:
        raise WeightsError(f"{where} does not hold the model it describes; " + "; ".join(problems))


def shorten_list(names: Sequence[str], most: int = 6) -> str:
    """Return the first names and the number of the rest, as printable text."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return escape_unprintable(", ".join(names[:most])) + rest
