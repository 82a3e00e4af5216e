"""A Vision Transformer that is a part of a larger file: under `encoder.`, `vision_model.`, `backbone.`, …"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from vitrail.errors import WeightsError, did_you_mean
from vitrail.weights.files import TensorFile, TensorInfo
from vitrail.weights.formats.base import FolderFiles
from vitrail.weights.tensor_rules import shorten_list

SEPARATORS = (".", "/")
"""What stands between the words of a tensor's name: a point, and a slash in Google's files."""
DEEPEST = 4
"""Most words in the name of a part that is looked for."""

OPTIMIZER = "opt/"
"""The beginning of the names in big_vision's files of an optimizer's averages, which look like a second model."""


class PartOfFile(TensorFile):
    """The tensors of a file whose names begin with the name of a part, without that beginning."""

    def __init__(self, whole: TensorFile, part: str) -> None:
        self.path, self.wrapper_key, self.whole = whole.path, whole.wrapper_key, whole
        beginnings = [part.rstrip("./") + separator for separator in SEPARATORS]
        self.prefix = next((start for start in beginnings if any(n.startswith(start) for n in whole.tensors)), "")
        if not self.prefix:
            parts = list_first_words(whole.tensors)
            there = f"its parts are {shorten_list(parts)}" if parts else "it has no parts"
            raise WeightsError(f"there is no part {part!r}{did_you_mean(part, parts) or ':'} {there}")
        start = len(self.prefix)
        self.tensors = {n[start:]: info for n, info in whole.tensors.items() if n.startswith(self.prefix)}

    @property
    def note(self) -> str:
        """A sentence about what was left out."""
        others = len(self.whole.tensors) - len(self.tensors)
        return f"a part of a larger file, {self.prefix[:-1]}: {others} other tensors were left out"

    def _read(self, name: str) -> Tensor:
        return self.whole.read(self.prefix + name)


def describe_part(folder_files: FolderFiles, part: str) -> FolderFiles:
    """Return the config files for a part: config.json may have a section for it, such as `encoder`.

    Without one, `vision_config` describes the images' encoder, wherever it stands. The rest of config.json describes
    the whole, whose width, heads and GELU may be others, and is left out.
    """
    config = folder_files.json("config.json")
    words = reversed(part.strip("./").replace("/", ".").split("."))
    keys = [key for word in words for key in (word, f"{word}_config", f"{word.rpartition('_')[0]}_config")]
    section = next((config[key] for key in (*keys, "vision_config") if isinstance(config.get(key), dict)), None)
    why = folder_files.config_not_used
    if section is None and config:
        why = f"it has no section for the part {part.strip('./')}"
    contents = {**folder_files.contents, "config.json": section or dict[str, Any]()}
    return dataclasses.replace(folder_files, contents=contents, config_not_used=why)


def find_parts(tensors: Mapping[str, TensorInfo], recognise: Callable[[Mapping[str, TensorInfo]], bool]) -> list[str]:
    """Return the parts that `recognise` accepts; of two that lie inside each other, the outer one."""
    groups: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        for start in _list_beginnings(name):
            groups.setdefault(start, {})[name[len(start) :]] = info
    found: dict[str, None] = {}  # in order, and quick to look in: a file may name thousands of parts
    for start in sorted(groups, key=len):
        if not any(outer in found for outer in _list_beginnings(start)) and recognise(groups[start]):
            found[start] = None
    return [start[:-1] for start in found]


def check_one_model(
    where: str, tensors: Mapping[str, TensorInfo], recognise: Callable[[Mapping[str, TensorInfo]], bool]
) -> None:
    """Raise a WeightsError if a file holds several models, each in a part of its own: only the caller can choose one.

    Args:
        where: the source, for the message.
        tensors: what the file holds.
        recognise: whether some tensors are a model.
    """
    parts = find_parts(tensors, recognise)
    parts = [part for part in parts if not part.startswith(OPTIMIZER)] or parts
    inside = {part + separator for part in parts for separator in SEPARATORS}
    rest = {name: info for name, info in tensors.items() if inside.isdisjoint(_list_beginnings(name))}
    if len(parts) > 1 and not recognise(rest):
        raise WeightsError(
            f"{where} holds several models, under {shorten_list(parts)}: choose one, as in part={parts[0]!r} "
            f"(convert: --part {parts[0]})"
        )


def list_first_words(tensors: Mapping[str, Any]) -> list[str]:
    """Return the first words of the names, each once."""
    beginnings = (_list_beginnings(name)[:1] for name in tensors)
    return list(dict.fromkeys(start[:-1] for starts in beginnings for start in starts))


def _list_beginnings(name: str) -> list[str]:
    """Return the beginnings of a name that end with a separator, the shortest first: a., a.b., …"""
    ends = [index + 1 for index, letter in enumerate(name) if letter in SEPARATORS]
    return [name[:end] for end in ends[:DEEPEST]]
