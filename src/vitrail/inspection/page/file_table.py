"""The last section of the report: links to the figures and the numbers beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from vitrail.inspection.page.inline import escape_text
from vitrail.inspection.page.words import TITLES

DATA = (".npz", ".csv")
BESIDE = {"rollout": "guesses", "positions": "neighbours"}
"""Data files without a figure of their own: their stem, by the figure that they belong to."""


def build_file_table(figures: Mapping[str, Path], folder: Path) -> str:
    """Return a table with a row of links to the files of each figure; "" if there is none."""
    rows = ""
    for name, path in sorted(figures.items(), key=lambda figure: _order_figure(figure[0])):
        links = " ".join(_build_link(file, folder) for file in _find_files(name, path))
        rows += f'<tr><th scope="row">{_name_figure(name)}</th><td>{links}</td></tr>'
    return f'<table class="files"><tbody>{rows}</tbody></table>' if rows else ""


def _name_figure(figure: str) -> str:
    """Return the title of a figure's section, with the figure's number if there are several."""
    name, _, number = figure.partition("-")
    return f"{TITLES[name]} {number}".strip()


def _order_figure(figure: str) -> tuple[int, str]:
    """Return a sort key: figures in the order of the sections."""
    return list(TITLES).index(figure.partition("-")[0]), figure


def _find_files(name: str, path: Path) -> list[Path]:
    """Return the files of a figure: pictures and data."""
    stems = [path.with_suffix("")] + ([path.with_name(BESIDE[name])] if name in BESIDE else [])
    places = [stem.with_name(stem.name + suffix) for stem in stems for suffix in (".png", ".svg", *DATA)]
    return [place for place in places if place.is_file()]


def _build_link(file: Path, folder: Path) -> str:
    relative = Path(os.path.relpath(file.absolute(), folder.absolute())).as_posix()
    return f'<a href="{quote(os.fsencode(relative))}">{escape_text(file.name)}</a>'
