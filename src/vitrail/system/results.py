"""What every verb returns: a small frozen dataclass that reads well when printed, in a notebook and as JSON."""

from __future__ import annotations

import base64
import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

Rows = Sequence[tuple[str, str]]
"""Names and values, for a person."""


class Result:
    """The base of results. Subclasses are frozen dataclasses with `@dataclass(frozen=True, repr=False)`.

    A subclass says what a person sees: `summary` gives names and values, `tables` and `figures` more for a notebook.
    """

    def summary(self) -> Rows:
        """Return what the result says, as names and values for a person."""
        return [(field.name, format_value(getattr(self, field.name))) for field in dataclasses.fields(self)]  # type: ignore[arg-type]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return tables for a notebook by their titles; the first row holds the names of the columns."""
        return {}

    def figures(self) -> Sequence[Path]:
        """Return the PNG files that a notebook shows."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data that JSON can hold. Models are left out."""
        pairs = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return {name: to_plain(value) for name, value in pairs if not _is_model(value)}

    def __repr__(self) -> str:
        rows = self.summary()
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([type(self).__name__, *(f"  {name:<{width}}  {value}" for name, value in rows)])

    def _repr_html_(self) -> str:
        parts = [f"<strong>{html.escape(type(self).__name__)}</strong>", _format_table([], self.summary())]
        for title, (columns, *rows) in self.tables().items():
            parts += [f"<div>{html.escape(title)}</div>", _format_table(columns, rows)]
        parts += [_inline_image(path) for path in self.figures() if path.is_file()]
        return "\n".join(parts)


def to_plain(value: Any) -> Any:
    """Turn a value into what JSON can hold: paths become strings, numbers that are not finite become None."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_plain(each) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "item"):  # a number of NumPy's or torch's
        return to_plain(value.item())
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def format_value(value: Any) -> str:
    """Return a value on one line: counts with separators, long lists by their length."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str | Path) or hasattr(value, "_asdict"):
        return str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_value(each)}" for key, each in value.items())
    if isinstance(value, Sequence):
        return ", ".join(map(format_value, value)) if len(value) <= 4 else f"{len(value):,} entries"
    return type(value).__name__


def format_count(number: int, noun: str) -> str:
    """Return a number of things, such as "1 image" or "1,200 classes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _is_model(value: Any) -> bool:
    return hasattr(value, "state_dict")


def _format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _inline_image(path: Path) -> str:
    """Return an image as HTML that needs no file beside it."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(path.stem)}" style="max-width: 100%">'
