"""Small pictures whose pixels say which they are, and data sets of them on disk."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, kind: str = "PNG", size: tuple[int, int] = (24, 20)) -> bytes:
    """Noise of its own for each number."""
    array = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def make_folder(root: Path, classes: dict[str, int], first: int = 0, kind: str = "PNG") -> Path:
    """Class folders with so many pictures each."""
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number:04}.{kind.lower()}").write_bytes(picture(first, kind))
            first += 1
    return root


def make_tar(path: Path, labels: list[int], first: int = 0) -> Path:
    """A shard as WebDataset writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, label in enumerate(labels, first):
            for suffix, content in (("png", picture(number)), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"{number:06}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def make_parquet(path: Path, labels: list[int], first: int = 0, rows: int = 7, names: tuple[str, ...] = ()) -> Path:
    """As the hub's data sets are."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": picture(n), "path": f"{n}.png"} for n in range(first, first + len(labels))]
    table = pa.table({"image": images, "label": labels})
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path
