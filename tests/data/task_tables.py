"""The same rows about images in every layout that has targets."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from pictures import picture

COUNT = 24
TAGS = [["indoor", "cat"] if index % 2 else ["outdoor"] for index in range(COUNT)]
AGES = [index + 0.25 for index in range(COUNT)]
SPLITS = ["train" if index < 16 else "val" for index in range(COUNT)]
LAYOUTS = ["csv", "csv-json", "csv-columns", "jsonl", "json", "parquet", "tar", "list", "dict"]


def make_layout(folder: Path, layout: str) -> Any:
    """Write the rows in a layout, or return them; all but list have the splits train and val."""
    names = [f"{index}.png" for index in range(COUNT)]
    if layout in ("list", "dict"):
        pairs = [(picture(index), {"tags": TAGS[index], "age": AGES[index]}) for index in range(COUNT)]
        return pairs if layout == "list" else {"train": pairs[:16], "val": pairs[16:]}
    if layout in ("parquet", "tar"):
        return _write_shards(folder, layout)
    for index, name in enumerate(names):
        (folder / name).write_bytes(picture(index))
    if layout.startswith("csv"):
        return _write_csv(folder, layout, names)
    records = [
        {"image": name, "tags": tags, "age": age, "split": split}
        for name, tags, age, split in zip(names, TAGS, AGES, SPLITS, strict=True)
    ]
    path = folder / f"rows.{layout}"
    path.write_text(json.dumps(records) if layout == "json" else "".join(json.dumps(each) + "\n" for each in records))
    return path


def _write_csv(folder: Path, layout: str, names: list[str]) -> Path:
    words = ["cat", "indoor", "outdoor"]
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        targets = words if layout == "csv-columns" else ["tags"]
        writer.writerow(["image", *targets, *([] if layout == "csv-columns" else ["age"]), "split"])
        for name, tags, age, split in zip(names, TAGS, AGES, SPLITS, strict=True):
            cell = json.dumps(tags) if layout == "csv-json" else "|".join(tags)
            flags = [int(word in tags) for word in words]
            writer.writerow([name, *(flags if layout == "csv-columns" else [cell, age]), split])
    return folder / "rows.csv"


def _write_shards(folder: Path, layout: str) -> Path:
    for split in ("train", "val"):
        chosen = [index for index in range(COUNT) if SPLITS[index] == split]
        if layout == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            columns = {
                "image": [{"bytes": picture(index), "path": f"{index}.png"} for index in chosen],
                "tags": [TAGS[index] for index in chosen],
                "age": [AGES[index] for index in chosen],
            }
            pq.write_table(pa.table(columns), folder / f"{split}.parquet", row_group_size=5)
            continue
        with tarfile.open(folder / f"{split}.tar", "w") as tar:
            for index in chosen:
                record = json.dumps({"tags": TAGS[index], "age": AGES[index]}).encode()
                for name, content in ((f"{index}.png", picture(index)), (f"{index}.json", record)):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


def write_csv(folder: Path, head: str, rows: list[str], images: int = 0) -> Path:
    """Write a CSV, and images called 0.png, 1.png and so on beside it."""
    for index in range(images):
        (folder / f"{index}.png").write_bytes(picture(index))
    (folder / "rows.csv").write_text("\n".join([head, *rows]) + "\n")
    return folder / "rows.csv"
