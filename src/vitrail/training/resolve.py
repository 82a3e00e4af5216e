"""Turn a recipe or a TOML file and settings into a configuration, and a configuration into TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w

from vitrail.config import Config
from vitrail.errors import ConfigError, did_you_mean
from vitrail.model.architecture import BACKBONE_OPTIONS, VitArchitecture
from vitrail.system.files import describe_reason, hide_folders, read_regular_file
from vitrail.training.config import ModelConfig, RunConfig

Tree = dict[str, Any]
SECTIONS: dict[str, type[Config]] = {name: field.annotation for name, field in RunConfig.model_fields.items()}  # type: ignore[misc]


STEPS, EPOCHS = ["schedule", "steps"], ["schedule", "epochs"]
NAME, WEIGHTS = ["model", "name"], ["model", "weights"]
ALTERNATIVES = ((STEPS, EPOCHS), (EPOCHS, STEPS), (NAME, WEIGHTS), (WEIGHTS, NAME))
"""Pairs of which a run has only one key: an override of the first removes the second from the recipe."""


MOST_BYTES = 10_000_000
"""Largest TOML file that is read."""
Settings = Sequence[str] | Mapping[str, Any]
"""Settings of a run that replace a recipe's: `key=value` texts, or a dictionary such as {"schedule.steps": 300} or
{"schedule": {"steps": 300}}, which leaves the other keys of the section as they are."""


def resolve(tree: Mapping[str, Any], settings: Settings = ()) -> RunConfig:
    """Build a configuration from the values of a recipe or a file, and settings that replace them, in their order.

    Raises:
        ConfigError: A key is unknown, or a value is not allowed.
    """
    return build_config(merge_settings(tree, settings))


def merge_settings(tree: Mapping[str, Any], settings: Settings = ()) -> Tree:
    """Return the values of a recipe or a file, by section, with settings that replace them; values are not checked.

    Raises:
        ConfigError: A key that was given without its section is unknown, or of several sections.
    """
    merged: Tree = _copy_tree(tree)
    given = name_settings(settings)
    for key, value in _read_settings(settings):
        path = _path(key)
        _set_value(merged, path, value if not isinstance(value, _Text) else _value(value, path))
        for one, other in ALTERNATIVES:
            if path == one and not given & {".".join(other), other[-1]}:
                merged[other[0]].pop(other[1], None)
    return merged


class _Text(str):
    """A value as it was typed, which is still to be parsed."""


def _read_settings(settings: Settings) -> Iterator[tuple[str, Any]]:
    if isinstance(settings, Mapping):
        yield from flatten_settings(settings)
        return
    if isinstance(settings, str) or not isinstance(settings, Sequence):
        raise ConfigError(f'settings = {settings!r}: give a dictionary such as {{"schedule.steps": 300}}, or a list')
    for setting in settings:
        key, _, text = setting.partition("=")
        if not (key.strip() and text.strip()):
            raise ConfigError(f"{setting!r} is not key=value, such as optimizer.learning_rate=1e-3")
        yield key.strip(), _Text(text.strip())


def flatten_settings(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values, also of dictionaries inside dictionaries."""
    for name, value in settings.items():
        if not isinstance(name, str):
            raise ConfigError(f"the setting {name!r} is no text: give a key such as schedule.steps")
        key = f"{section}{name.strip()}"
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{key}.")
        else:
            yield key, str(value) if isinstance(value, Path) else _copy_tree(value)


def name_settings(settings: Settings) -> set[str]:
    """Return the keys of the settings: dotted, or without their section if they were given so."""
    return {key for key, _ in _read_settings(settings)}


def build_config(tree: Tree) -> RunConfig:
    """Check all keys and values, and return the configuration.

    Raises:
        ConfigError: A key is unknown or missing, or a value is not allowed.
    """
    for section, values in tree.items():
        _check_section(section, values)
    if "source" not in tree.get("data", {}):
        raise ConfigError(
            "there is no data to train on: give data.source=DATA, such as a folder with one for each class"
        )
    # Without their required keys, these two sections raise an error that says what to give.
    sections = {"model": {}, "schedule": {}, **tree}
    return RunConfig(**{section: _build_section(section, values) for section, values in sections.items()})


def change_config(config: RunConfig, update: dict[str, dict[str, Any]], name: str = "") -> RunConfig:
    """Return the configuration with some values changed and, if `name` is given, a folder inside the run's folder."""
    tree = config.model_dump()
    update = {**update, "run": {**update.get("run", {}), "folder": config.run.folder / name}}
    if name:
        update["run"]["copy_to"] = None  # two runs must not have one copy
    return RunConfig(**{section: {**values, **update.get(section, {})} for section, values in tree.items()})


def check_keys(keys: Iterable[str]) -> None:
    """Raise a ConfigError that names the nearest right key if one of these dotted keys is unknown."""
    for key in keys:
        section, *names = _path(key)
        values: Any = {}
        for name in reversed(names):
            values = {name: values}
        _check_section(section, values)


def _check_section(section: str, values: Any) -> None:
    if section not in SECTIONS:
        raise ConfigError(f"unknown section {section!r}{_hint(section, SECTIONS)}")
    _check_names(section, SECTIONS[section], list_keys(section), values)


def _build_section(name: str, values: Tree) -> Config:
    """Build one section, and put its name into error messages."""
    try:
        return SECTIONS[name](**values)
    except ConfigError as error:
        message = str(error)
        starts_with_key = message.split(" ")[0].split(".")[0] in list_keys(name)
        raise ConfigError(f"{name}.{message}" if starts_with_key else message) from None


def _check_names(where: str, kind: type[Config], allowed: list[str], values: Any) -> None:
    """Check the keys of a section, or of a part of one such as data.augmentation."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is a section: give {where}.KEY=value")
    for name, value in values.items():
        if name not in allowed:
            raise ConfigError(f"unknown option '{where}.{name}'{_hint(name, allowed)}")
        part = kind.model_fields[name].annotation if name in kind.model_fields else None
        if isinstance(part, type) and issubclass(part, Config) and not isinstance(value, part):
            _check_names(f"{where}.{name}", part, list(part.model_fields), value)


def read_toml(path: Path) -> Tree:
    """Read a TOML file, and raise a ConfigError if that is not possible."""
    try:
        return tomllib.loads(read_regular_file(path, MOST_BYTES).decode().replace("\r\n", "\n"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {describe_reason(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def hide_config_folders(config: RunConfig) -> RunConfig:
    """Return a configuration that names data, weights and run without their folders: for a model card."""
    data = config.data.model_copy(update={"source": hide_folders(config.data.source)})
    fewshot = None if config.run.fewshot_data is None else hide_folders(config.run.fewshot_data)
    folder = Path(hide_folders(str(config.run.folder)))
    run = config.run.model_copy(update={"folder": folder, "fewshot_data": fewshot, "copy_to": None})
    weights = None if config.model.weights is None else hide_folders(config.model.weights)
    model = config.model.model_copy(update={"weights": weights})
    return config.model_copy(update={"data": data, "model": model, "run": run})


def to_toml(config: RunConfig) -> str:
    """Return a configuration as TOML, including defaults, so that a later change of a default does not change it."""
    return tomli_w.dumps(_table(config))


def _table(config: Config) -> Tree:
    """Return a section as a TOML table. TOML has no null: None is left out if it is the default, and else "none"."""
    written: Tree = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            written[name] = _table(value)
        elif value is None and field.default is None:
            del written[name]
    return {name: "none" if value is None else value for name, value in written.items()}


def _path(key: str) -> list[str]:
    """Split a dotted key. A key that only one section has may come without its section: learning_rate=1e-3."""
    first, *rest = key.split(".")
    is_whole = first in SECTIONS or (rest and not any(first in list_keys(section) for section in SECTIONS))
    return [first, *rest] if is_whole else [*_find_section(first), *rest]


def _find_section(key: str) -> list[str]:
    """Return the path of a key that was given without its section."""
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
    """Return the keys of a section. The section `model` also has those of the architecture."""
    kind = SECTIONS[section]
    names = list(kind.model_fields)
    if kind is ModelConfig:
        names += [name for name in (*VitArchitecture.model_fields, *BACKBONE_OPTIONS) if name not in names]
    return names


def _value(text: str, path: list[str]) -> Any:
    """Parse a value as TOML; what is not TOML is text."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # A shell removes quotes: [tensorboard,wandb] is a list of words.
        is_list = text.startswith("[") and text.endswith("]")
        value = [word.strip() for word in text[1:-1].split(",")] if is_list else text
    if value == "none" and len(path) > 2:
        return None  # sections replace this word themselves, their parts do not
    return text if _holds_text(path) and not isinstance(value, str) else value


def _holds_text(path: list[str]) -> bool:
    """Return whether a key holds text: a folder may be called 2024 or 2024-12-31, which TOML reads as other types."""
    field = SECTIONS[path[0]].model_fields.get(path[1]) if path[0] in SECTIONS and len(path) == 2 else None
    return field is not None and bool({str, Path} & {field.annotation, *get_args(field.annotation)})


def _set_value(tree: Tree, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = below
    tree[path[-1]] = value


def _copy_tree(value: Any) -> Any:
    """Copy tables and lists. Tuples become lists, because TOML has none: so a tree equals what a file gives back."""
    if isinstance(value, Mapping):
        return {key: _copy_tree(inner) for key, inner in value.items()}
    return [_copy_tree(inner) for inner in value] if isinstance(value, tuple | list) else value
