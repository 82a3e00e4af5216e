"""Flags in the help: without a type, because a flag takes no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _CommandWithFlags(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return hide_flag_types(super().get_params(ctx))


class _GroupWithFlags(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return hide_flag_types(super().get_params(ctx))


class App(typer.Typer):
    """A typer app whose help shows no type beside flags. Typer itself writes `<bool>` there in newer versions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_GroupWithFlags, **options)

    def command(self, *names: Any, **options: Any) -> Callable[[Any], Any]:
        """Register a command, as typer's `command` does."""
        return super().command(*names, cls=_CommandWithFlags, **options)


def hide_flag_types(params: list[Any]) -> list[Any]:
    """Give every flag among the parameters of a command an empty type for the help, and return the parameters."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params
