"""Commands that people copy from what is printed."""

from __future__ import annotations

import re
import shlex

from vitrail.system import files

_PLAIN = re.compile(r"[\w@%+=:,./\\-]+")


def quote_word(text: str) -> str:
    """Return one word of a command as a shell takes it: a POSIX shell, or on Windows cmd and PowerShell."""
    if not files.IS_WINDOWS:
        return shlex.quote(text)
    return text if _PLAIN.fullmatch(text) else f'"{text}"'  # a file name cannot have a quote there
