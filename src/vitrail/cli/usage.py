"""What is printed after a command that was typed wrongly: one line says what is wrong, one where its help is."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TypeGuard


class UsageError(Protocol):
    """A wrong command, as typer raises it. Its newer versions keep the class to themselves."""

    ctx: Any
    exit_code: int

    def format_message(self) -> str:
        """Return what is wrong."""
        ...

    def show(self) -> None:
        """Print it as typer does."""
        ...


def is_usage_error(error: Exception) -> TypeGuard[UsageError]:
    """Return whether typer raised this error, because a command was typed wrongly."""
    return all(hasattr(error, name) for name in ("ctx", "exit_code", "format_message", "show"))


def print_usage_error(error: UsageError) -> int:
    """Print what is wrong with a command and where its help is, and return the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return error.exit_code
    print(f"error: {_describe(error)}", file=sys.stderr)
    if error.ctx is not None:
        print(f"try: {error.ctx.command_path} {error.ctx.help_option_names[0]}", file=sys.stderr)
    return error.exit_code


def _describe(error: UsageError) -> str:
    """Return what is wrong in one sentence; of something that is missing also what it is."""
    text = error.format_message().rstrip(".")
    missing = type(error).__name__ == "MissingParameter" and getattr(getattr(error, "param", None), "help", None)
    first = text[:1].lower() + text[1:]
    return f"{first}: {missing.strip().rstrip('.')}" if missing else first
