"""From what a person gives (a recipe or a file, and key=value) to a configuration, and back to a file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from vitrail.config import Config
from vitrail.errors import ConfigError, did_you_mean
from vitrail.model.architecture import VitArchitecture
from vitrail.train.config import ModelConfig, RunConfig

Tree = dict[str, Any]
SECTIONS = {name: field.annotation for name, field in RunConfig.model_fields.items()}


def resolve(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
    """A recipe's or a file's values, with `key=value` laid over them one after the other."""
    merged: Tree = _copied(tree)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not key=value, such as optimizer.learning_rate=1e-3")
        _put(merged, _path(key.strip()), _value(text.strip()))
    return checked(merged)


def checked(tree: Tree) -> RunConfig:
    """The configuration, if every key and value can be."""
    for section, keys in tree.items():
        if section not in SECTIONS:
            raise ConfigError(f"unknown section {section!r}{_hint(section, SECTIONS)}")
        if not isinstance(keys, dict):
            raise ConfigError(f"{section} is a section: give {section}.KEY")
        for key in keys:
            _path(f"{section}.{key}")
    if "source" not in tree.get("data", {}):
        raise ConfigError(
            "there is no data to train on: give data.source=DATA, such as a folder with one for each class"
        )
    return RunConfig(**tree)


def read_file(path: Path) -> Tree:
    """A TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def to_toml(config: RunConfig) -> str:
    """All of a configuration, defaults included, so that a later default does not change it."""
    return tomli_w.dumps(_table(config))


def _table(config: Config) -> Tree:
    """TOML has no null: what is nothing by default is left out, and "none" stands for what is nothing by choice."""
    written: Tree = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            written[name] = _table(value)
        elif value is None and field.default is None:
            del written[name]
    return {name: "none" if value is None else value for name, value in written.items()}


def _path(key: str) -> list[str]:
    """A dotted key, checked. A key of one section alone may come without it: learning_rate=1e-3."""
    first, *rest = key.split(".")
    if not rest and first not in SECTIONS:
        return _owned(first)
    if first not in SECTIONS:
        raise ConfigError(f"unknown section {first!r}{_hint(first, SECTIONS)}")
    if not rest:
        raise ConfigError(f"{first} is a section: give {first}.KEY=value")
    if rest[0] not in keys_of(first):
        raise ConfigError(f"unknown option '{first}.{rest[0]}'{_hint(rest[0], keys_of(first))}")
    return [first, *rest]


def _owned(key: str) -> list[str]:
    """A key without its section, with it."""
    owners = [section for section in SECTIONS if key in keys_of(section)]
    if len(owners) == 1:
        return [owners[0], key]
    if owners:
        raise ConfigError(f"{key!r} could be {' or '.join(f'{owner}.{key}' for owner in owners)}: say which")
    everything = {name: f"{section}.{name}" for section in SECTIONS for name in keys_of(section)}
    raise ConfigError(f"unknown option {key!r}{did_you_mean(key, everything) or _hint(key, SECTIONS)}")


def _hint(wrong: str, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    return did_you_mean(wrong, allowed) or f"; there are {', '.join(allowed)}"


def keys_of(section: str) -> list[str]:
    """The options of a section; those of a model are the architecture's too."""
    kind = SECTIONS[section]
    assert kind is not None
    names = list(kind.model_fields)
    return (
        names + [name for name in VitArchitecture.model_fields if name not in names] if kind is ModelConfig else names
    )


def _value(text: str) -> Any:
    """As TOML reads it; what it cannot read is a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: Tree, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = below
    tree[path[-1]] = value


def _copied(tree: Mapping[str, Any]) -> Tree:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
