"""From what a person gives (a recipe or a file, and key=value) to a configuration, and back to a file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w

from vitrail.config import Config
from vitrail.errors import ConfigError, did_you_mean
from vitrail.model.architecture import VitArchitecture
from vitrail.training.config import ModelConfig, RunConfig

Tree = dict[str, Any]
SECTIONS: dict[str, type[Config]] = {name: field.annotation for name, field in RunConfig.model_fields.items()}  # type: ignore[misc]


STEPS, EPOCHS = ["schedule", "steps"], ["schedule", "epochs"]
NAME, WEIGHTS = ["model", "name"], ["model", "weights"]
INSTEAD = ((STEPS, EPOCHS), (EPOCHS, STEPS), (NAME, WEIGHTS), (WEIGHTS, NAME))
"""Of which a run has one: who gives the one does not want the other, which the recipe has."""


def resolve(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A recipe's or a file's values, with `key=value` laid over them one after the other."""
    merged: Tree = _copied(tree)
    for override in overrides:
        key, _, text = override.partition("=")
        if not text.strip():
            raise ConfigError(f"{override!r} is not key=value, such as optimizer.learning_rate=1e-3")
        path = _path(key.strip())
        _put(merged, path, _value(text.strip(), path))
        for one, other in INSTEAD:
            if path == one and not any(o.partition("=")[0].strip() in (".".join(other), other[-1]) for o in overrides):
                merged[other[0]].pop(other[1], None)
    return build_config(merged)


def build_config(tree: Tree) -> RunConfig:
    """The configuration, if every key and value can be."""
    for section, values in tree.items():
        if section not in SECTIONS:
            raise ConfigError(f"unknown section {section!r}{_hint(section, SECTIONS)}")
        _check_names(section, SECTIONS[section], list_keys(section), values)
    if "source" not in tree.get("data", {}):
        raise ConfigError(
            "there is no data to train on: give data.source=DATA, such as a folder with one for each class"
        )
    # What is required and absent is told by its section, which knows what to give.
    given = {"model": {}, "schedule": {}, **tree}
    return RunConfig(**{section: _section(section, values) for section, values in given.items()})


def _section(name: str, values: Tree) -> Config:
    """Built for itself, so that an error can say where it is."""
    try:
        return SECTIONS[name](**values)
    except ConfigError as error:
        told = str(error)
        dotted = told.split(" ")[0].split(".")[0] in list_keys(name)
        raise ConfigError(f"{name}.{told}" if dotted else told) from None


def _check_names(where: str, kind: type[Config], allowed: list[str], values: Any) -> None:
    """Of the options in a section, or in a part of one such as data.augmentation."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is a section: give {where}.KEY=value")
    for name, value in values.items():
        if name not in allowed:
            raise ConfigError(f"unknown option '{where}.{name}'{_hint(name, allowed)}")
        part = kind.model_fields[name].annotation if name in kind.model_fields else None
        if isinstance(part, type) and issubclass(part, Config) and not isinstance(value, part):
            _check_names(f"{where}.{name}", part, list(part.model_fields), value)


def read_toml(path: Path) -> Tree:
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
    """A dotted key. A key of one section alone may come without it: learning_rate=1e-3."""
    return key.split(".") if "." in key or key in SECTIONS else _owned(key)


def _owned(key: str) -> list[str]:
    """A key without its section, with it."""
    owners = [section for section in SECTIONS if key in list_keys(section)]
    if len(owners) == 1:
        return [owners[0], key]
    if owners:
        raise ConfigError(f"{key!r} could be {' or '.join(f'{owner}.{key}' for owner in owners)}: say which")
    everything = {name: f"{section}.{name}" for section in SECTIONS for name in list_keys(section)}
    raise ConfigError(f"unknown option {key!r}{did_you_mean(key, everything) or _hint(key, SECTIONS)}")


def _hint(wrong: str, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    return did_you_mean(wrong, allowed) or f"; there are {', '.join(allowed)}"


def list_keys(section: str) -> list[str]:
    """The options of a section; those of a model are the architecture's too."""
    kind = SECTIONS[section]
    names = list(kind.model_fields)
    return (
        names + [name for name in VitArchitecture.model_fields if name not in names] if kind is ModelConfig else names
    )


def _value(text: str, path: list[str]) -> Any:
    """As TOML reads it; what it cannot read is a word."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # A shell takes quotes away: [tensorboard,wandb] is a list of words.
        listed = text.startswith("[") and text.endswith("]")
        value = [word.strip() for word in text[1:-1].split(",")] if listed else text
    if value == "none" and len(path) > 2:
        return None  # sections know this word, their parts do not
    return text if _is_word(path) and not isinstance(value, str) else value


def _is_word(path: list[str]) -> bool:
    """Whether a key holds words: a folder may be called 2024, or 2024-12-31, which TOML takes for something else."""
    field = SECTIONS[path[0]].model_fields.get(path[1]) if path[0] in SECTIONS and len(path) == 2 else None
    return field is not None and bool({str, Path} & {field.annotation, *get_args(field.annotation)})


def _put(tree: Tree, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = below
    tree[path[-1]] = value


def _copied(value: Any) -> Any:
    """Tables and lists of our own. TOML has no tuples: with lists, what was given equals what a file gives back."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, tuple | list) else value
