"""Names on the Hugging Face hub, as they are typed: `hf:owner/name[@revision]`."""

from __future__ import annotations

import re

from vitrail.errors import ConfigError

PREFIX = "hf:"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(name: str) -> bool:
    """Return whether this is owner/name, without `hf:` and without a revision."""
    return _NAME.fullmatch(name) is not None


def split_hub_name(source: str) -> tuple[str, str | None]:
    """Return owner/name and the revision, None if there is none, of `hf:owner/name[@revision]`.

    Raises:
        ConfigError: it is something else.
    """
    name, _, revision = source.removeprefix(PREFIX).partition("@")
    if not source.startswith(PREFIX) or not is_hub_name(name):
        raise ConfigError(f"{source!r} is not hf:owner/name or hf:owner/name@revision")
    return name, revision or None
