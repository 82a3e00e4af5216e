"""Read tables of text files: CSV, a record in JSON on each line, or a list of records in JSON.

Rows that cannot be used are kept with the reason, so that one of them costs nothing but itself.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.sources.csv_text import explain_encoding, read_csv_lines
from vitrail.data.sources.folder import IMAGE_COLUMNS, find_split_column
from vitrail.data.sources.source import read_small_text
from vitrail.data.tables.row_table import RowCollector, RowTable, name_table
from vitrail.errors import DataError
from vitrail.system.files import open_regular_file
from vitrail.tasks.task import Cell

JSON_TABLES = (".jsonl", ".json")
TEXT_TABLES = (".csv", *JSON_TABLES)
"""The endings of tables that are text."""
MOST_LINE_BYTES = 1 << 20
"""The longest line of a table in JSON."""
MOST_JSON_BYTES = 500_000_000
"""The largest list of records in JSON; tables with a record a line may be of any size."""
MOST_CELL_LINES = 100
"""The most lines of a cell in quotes; one with more has surely a quote too many."""


def read_text_table(path: Path, keep: Sequence[str] = ()) -> RowTable:
    """Return the rows of a .csv, .jsonl or .json; paths of images are relative to its folder, or absolute.

    Args:
        path: the table.
        keep: the columns to keep, besides images and splits; all if empty.

    Raises:
        DataError: the file cannot be read, names no images or is larger than allowed.
    """
    kind = path.suffix.lower()
    collect = {".csv": _collect_csv, ".jsonl": _collect_json_lines, ".json": _collect_json}[kind]
    rows = RowCollector(name_table(path), keep, "record" if kind == ".json" else "line")
    try:
        collect(path, rows)
    except UnicodeDecodeError:
        raise DataError(explain_encoding(path, rows.title)) from None
    except OSError as error:
        raise DataError(f"{rows.title} cannot be read: {error.strerror or error}") from None
    return rows.finish(path)


def _collect_csv(path: Path, rows: RowCollector) -> None:
    with open_regular_file(path) as file:
        reader = csv.reader(read_csv_lines(file, rows.title), strict=True)
        began = 1  # the line on which the row that is read begins
        try:
            written = next(reader, [])
            head = [name.strip() for name in written]
            rows.is_plain = head == written
            _check_head(head, rows.title)
            image = _find_image_column(head, rows.title)
            split_column = find_split_column(head)
            columns = [(place, name) for place, name in enumerate(head) if _is_target(name, image, split_column)]
            split = None if split_column is None else head.index(split_column)
            image_place = head.index(image)
            began = reader.line_num + 1
            for cells in reader:
                first, began = began, reader.line_num + 1
                if began - first > MOST_CELL_LINES and any(len(cell.splitlines()) > MOST_CELL_LINES for cell in cells):
                    raise DataError(_explain_quote(rows.title, first, f"goes on for more than {MOST_CELL_LINES} lines"))
                if not cells:
                    continue
                problem = "" if len(cells) == len(head) else _explain_cells(len(cells), len(head))
                cells += [""] * (len(head) - len(cells))
                row: dict[str, Cell] = {} if problem else {name: cells[place] for place, name in columns}
                # A row with a comma too many may have anything in its split.
                part = None if split is None or problem else cells[split].strip()
                rows.add(reader.line_num, cells[image_place], part, row, problem)
        except csv.Error as error:
            if reader.line_num > began or "unexpected end" in str(error):
                raise DataError(_explain_quote(rows.title, began, "is not closed")) from None
            raise DataError(f"{rows.title}, line {reader.line_num}: {error}") from None


def _explain_quote(title: str, line: int, problem: str) -> str:
    return f'{title}, line {line}: a quote that begins here {problem}: close it, or write "" for a quote in a cell'


def _check_head(head: Sequence[str], title: str) -> None:
    twice = next((name for place, name in enumerate(head) if name and name in head[:place]), None)
    if twice is not None:
        raise DataError(f"{title} has two columns {twice!r}: rename one")


def _explain_cells(found: int, expected: int) -> str:
    hint = "; a cell with a comma in it needs quotes" if found > expected else ""
    return f"there are {found} cells, and {expected} columns{hint}"


def _collect_json_lines(path: Path, rows: RowCollector) -> None:
    with open_regular_file(path) as file:
        image = None
        for number, line in enumerate(_read_lines(file), start=1):
            if line is None:
                rows.add(number, None, None, {}, f"the line is longer than {MOST_LINE_BYTES:,} bytes")
                continue
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                reason = "too deep" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
                rows.add(number, None, None, {}, f"this is no record in JSON ({reason[:100]})")
                continue
            image = _add_record(rows, number, record, image)
        if image is None and rows.lines:
            raise DataError(f"{rows.title} has no record with one of {', '.join(IMAGE_COLUMNS)}")


def _read_lines(file: Any) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for one that is too long."""
    while line := file.readline(MOST_LINE_BYTES):
        if len(line) < MOST_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MOST_LINE_BYTES)
        yield None


def _collect_json(path: Path, rows: RowCollector) -> None:
    try:
        records = json.loads(read_small_text(path, MOST_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        reason = "it is too deep" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{rows.title} is no JSON: {reason[:200]}") from None
    if not isinstance(records, list):
        raise DataError(
            f"{rows.title} is no list of records: write [{{'image': …}}, …] with double quotes, or a "
            "record on each line of a .jsonl"
        )
    image = None
    for number, record in enumerate(records, start=1):
        image = _add_record(rows, number, record, image)
    if image is None and records:
        raise DataError(f"{rows.title} has no record with one of {', '.join(IMAGE_COLUMNS)}")


def _add_record(rows: RowCollector, number: int, record: Any, image: str | None) -> str | None:
    """Add a record of JSON; return the name of the image column, once a record has one."""
    if not isinstance(record, Mapping):
        rows.add(number, None, None, {}, f"a {type(record).__name__} is no record: write {{…}}")
        return image
    try:
        record = replace_surrogates(record)
    except RecursionError:
        rows.add(number, None, None, {}, "this is no record in JSON (too deep)")
        return image
    image = image or next((name for name in record if name.lower() in IMAGE_COLUMNS), None)
    split_column = find_split_column(list(record))
    split = None if split_column is None else record[split_column]
    cells = {name: cell for name, cell in record.items() if _is_target(name, image, split_column)}
    rows.add(number, record.get(image) if image else None, None if split is None else str(split).strip(), cells)
    return image


def replace_surrogates(value: Any) -> Any:
    r"""Return JSON values without halves of characters, such as "\ud800", which cannot be printed."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [replace_surrogates(each) for each in value]
    if isinstance(value, Mapping):
        return {replace_surrogates(name): replace_surrogates(each) for name, each in value.items()}
    return value


def _find_image_column(names: Sequence[str], title: str) -> str:
    image = next((name for name in names if name.lower() in IMAGE_COLUMNS), None)
    if image is None:
        raise DataError(
            f"{title} has the columns {', '.join(names) or 'none'}: it needs one of {', '.join(IMAGE_COLUMNS)}"
        )
    return image


def _is_target(name: str, image: str | None, split: str | None) -> bool:
    """Return whether a column may be a target. Columns without a name are row numbers, as pandas writes them."""
    return name not in (image, split) and bool(name.strip())
