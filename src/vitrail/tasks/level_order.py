"""Read levels from cells, and find their order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from vitrail.errors import DataError
from vitrail.tasks.cells import read_name
from vitrail.tasks.task import Cell

BEGINS_WITH_NUMBER = re.compile(r"[-−+]?(\d+([.]\d*)?|[.]\d+)")


def read_level(column: str, cell: Cell) -> str:
    """Return the name of a level, "" if the cell is empty. A number is always written the same: 4.0 and "04" are 4."""
    name = read_name(column, cell)
    try:
        number = float(name)
    except ValueError:
        return name
    return "" if math.isnan(number) else f"{number:.12g}"


def sort_levels(column: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return levels by the numbers that they are or begin with; raise a DataError if these tell no order."""
    places = {name: _find_number(name) for name in sorted(names)}
    if None in places.values() or len(set(places.values())) < len(places):
        raise DataError(
            f"the levels of {column} have no clear order: {', '.join([*places][:8])}; begin each with a number of its "
            "own, such as '1 poor' and '2 fair', or give vitrail.finetune(…, task=Levels(names=('poor', 'fair'), "
            f"column={column!r})) in Python"
        )
    return tuple(sorted(places, key=lambda name: places[name] or 0.0))


def _find_number(name: str) -> float | None:
    """Return the number that a name is, or begins with; None if there is none."""
    try:
        return float(name)
    except ValueError:
        found = BEGINS_WITH_NUMBER.match(name)
        return None if found is None else float(found[0].replace("−", "-"))
