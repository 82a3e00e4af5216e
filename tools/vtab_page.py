"""Write the tables of VTAB's tasks at the end of docs/transfer.md.

    python tools/vtab_page.py            write the page
    python tools/vtab_page.py --check    fail if the page is not up to date

The page is written by hand up to `MARKER`; everything after it is replaced.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vitrail.transfer.vtab_tasks import GROUPS, TASKS, VtabTask

PAGE = Path(__file__).parents[1] / "docs" / "transfer.md"
MARKER = "<!-- The tables below are written by tools/vtab_page.py. -->\n"
COLUMNS = ("name", "classes", "from", "in TFDS", "train, val, test", "how VTAB makes them", "label", "trained with")


def write_tables() -> str:
    """Return the tasks as Markdown tables, one for each group."""
    return "\n".join(f"### {group.capitalize()}\n\n{write_table(group)}" for group in GROUPS)


def write_table(group: str) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(write_row(task) for task in TASKS.values() if task.group == group)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_row(task: VtabTask) -> tuple[str, ...]:
    changes = [name for name, allowed in (("crops", task.crop), ("mirror images", task.mirror)) if allowed]
    return (
        f"`{task.name}`",
        str(task.classes),
        f"[{task.origin}]({task.url})",
        f"`{task.tfds}`",
        " / ".join(f"{count:,}" for count in task.images),
        task.parts,
        task.annotation + (f" (`{task.label.__name__}`)" if task.label is not None else ""),
        " and ".join(changes) or "neither crops nor mirror images",
    )


def write_page(text: str) -> str:
    """Return the page with its hand-written part as it is and its tables written anew."""
    introduction, marker, _ = text.partition(MARKER)
    if not marker:
        raise ValueError(f"{PAGE.name} has no line {MARKER.strip()!r}")
    return f"{introduction}{MARKER}\n{write_tables()}"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    page = write_page(text)
    if "--check" in sys.argv[1:]:
        sys.exit("docs/transfer.md is not up to date: run python tools/vtab_page.py" if page != text else 0)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
