"""The folder of what is done of a file of predictions, so that predicting can be stopped at any moment and continued.

The images are cut into parts that depend on the list and the batch size alone. A part ends where a batch ends, so each
image is computed in the same batch, whoever computes the part. `answers.jsonl.parts` holds plan.json, which says what
was begun, and a file for each part that is done. Each file is whole or absent.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitrail.errors import ConfigError, DataError
from vitrail.inference.answer_images import AnsweredImage
from vitrail.inference.answers import Answer
from vitrail.inference.engine import FloatArray
from vitrail.inference.prediction_result import FilePrediction
from vitrail.inference.prediction_rows import Form
from vitrail.reliability.unknown import Familiarity
from vitrail.system.files import describe_reason, is_folder, write_whole
from vitrail.system.locks import lock_file
from vitrail.tasks.task import AnswerLine

SUFFIX, PLAN, LOCK, DRAFT, CLAIMED = ".parts", "plan.json", "lock", "joined", ".claimed"
MOST_PARTS = 1000
"""The largest number of parts: so many files are in the folder, or twice as many with embeddings."""
LEAST_IMAGES = 64
"""The smallest number of images in a part, but for the last."""

Plan = dict[str, Any]
"""What decides the predictions: digests of the model and of the list of images, and every option."""
FORMS: dict[str, Form] = {".jsonl": "json", ".csv": "csv"}
"""The form of the rows by the ending of the file."""


def check_prediction_path(out: Path | None) -> None:
    """Raise a ConfigError if predictions cannot be written there, or are there already."""
    if out is None:
        return
    if out.suffix.lower() not in FORMS:
        raise ConfigError(f"--out {out}: give a file that ends in {' or '.join(FORMS)}")
    if is_folder(out) or not is_folder(out.absolute().parent):
        raise ConfigError(f"--out {out}: give the name of a file in a folder that is there")
    if out.exists() and not (locate_folder(out) / PLAN).exists():
        raise ConfigError(f"--out {out} exists already: delete it, or give another name")


def locate_folder(out: Path) -> Path:
    """Return the folder beside a file of predictions where its parts lie."""
    return out.with_name(out.name + SUFFIX)


def count_part_images(images: int, batch_size: int) -> int:
    """Return the number of images in each part but the last: some whole batches."""
    wanted = max(LEAST_IMAGES, -(-images // MOST_PARTS))
    return -(-wanted // batch_size) * batch_size


class PredictionParts:
    """What is done of a file of predictions.

    Args:
        out: the file that is to be written; the folder of parts lies beside it.
        plan: must be the same as that of what is done already.
        images: the number of all images.
        batch_size: images that are computed at a time.
    """

    def __init__(self, out: Path, plan: Plan, images: int, batch_size: int) -> None:
        self.out, self.plan, self.images = out, plan, images
        self.folder = locate_folder(out)
        self.part_images = count_part_images(images, batch_size)
        self.count = -(-images // self.part_images)
        self._lock: BinaryIO | None = None

    @property
    def draft(self) -> Path:
        """The file where parts are joined, which then becomes the file of predictions."""
        return self.folder / DRAFT

    def open(self) -> None:
        """Lock the folder, and begin or continue. Only one process calls this; others write parts.

        Raises:
            ConfigError: another process writes the file, or something else was begun.
        """
        plan = self.folder / PLAN
        with self.explain_disk_errors():
            self.folder.mkdir(exist_ok=True)
            self._lock = _lock_folder(self.folder, self.out)
        try:
            with self.explain_disk_errors():
                if plan.exists():
                    self._check_same_plan(plan.read_bytes())
                    for claim in self.folder.glob(f"part-*{CLAIMED}"):
                        claim.unlink()
                else:
                    self._delete_files()
                    write_whole(plan, (json.dumps(self.plan, indent=2) + "\n").encode())
        except BaseException:
            self.close()
            raise

    def is_begun(self) -> bool:
        """Return whether this process sees what `open` wrote."""
        return (self.folder / PLAN).exists()

    def close(self) -> None:
        """Let other processes continue."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def discard(self) -> None:
        """Delete the folder, after the file of predictions is in its place."""
        with self.explain_disk_errors():
            (self.folder / PLAN).unlink()  # first: without it, nothing else in the folder counts
            self._delete_files()
            self.close()  # Windows deletes no open file
            (self.folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # files of somebody else
                self.folder.rmdir()

    def list_images(self, number: int) -> range:
        """Return the numbers of a part's images."""
        return range(number * self.part_images, min((number + 1) * self.part_images, self.images))

    def find_done(self) -> set[int]:
        """Return the numbers of the parts that are done."""
        names = {path.name for path in self.folder.iterdir()}
        return {number for number in range(self.count) if self._rows_path(number).name in names}

    def claim(self, number: int) -> bool:
        """Take a part for this process; return False if another one has taken it since `open`."""
        with self.explain_disk_errors():
            try:
                self._rows_path(number).with_suffix(CLAIMED).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True

    def write(self, number: int, answered: Sequence[AnsweredImage]) -> None:
        """Write a part that is done."""
        embeddings = [each.embedding for each in answered if each.embedding is not None]
        lines = "".join(encode_prediction(each.prediction) + "\n" for each in answered)
        with self.explain_disk_errors():
            if embeddings:
                content = io.BytesIO()
                np.save(content, np.stack(embeddings))
                write_whole(self._embeddings_path(number), content.getvalue())
            write_whole(self._rows_path(number), lines.encode())  # last: with it, the part is done

    def read(self, number: int) -> list[FilePrediction] | None:
        """Return the predictions of a part; None if it is not done.

        Raises:
            DataError: the file is damaged.
        """
        path = self._rows_path(number)
        try:
            rows = [decode_prediction(line) for line in path.read_bytes().splitlines()]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, LookupError):
            rows = []
        if len(rows) != len(self.list_images(number)):
            raise DataError(f"{path} is damaged: delete it, and the same command computes it again")
        return rows

    def read_embeddings(self, number: int, count: int) -> FloatArray:
        """Return the embeddings of the `count` images of a part that were used: (count, D), or (0, 0) without images.

        Raises:
            DataError: the file is damaged.
        """
        rows: FloatArray = np.empty((0, 0), np.float32)
        path = self._embeddings_path(number)
        with suppress(FileNotFoundError, ValueError, EOFError):
            rows = np.load(path)
        if len(rows) != count:
            rest = self._rows_path(number).name
            raise DataError(f"{path} is damaged: delete it and {rest}, and the same command computes them again")
        return rows

    @contextmanager
    def explain_disk_errors(self) -> Iterator[None]:
        """Turn an OSError into a ConfigError that names the file of predictions."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"--out {self.out} cannot be written: {describe_reason(error)}") from None

    def _rows_path(self, number: int) -> Path:
        return self.folder / f"part-{number:06}.jsonl"

    def _embeddings_path(self, number: int) -> Path:
        return self.folder / f"part-{number:06}.npy"

    def _delete_files(self) -> None:
        for path in [*self.folder.glob("part-*"), self.draft]:
            path.unlink(missing_ok=True)

    def _check_same_plan(self, content: bytes) -> None:
        try:
            begun = json.loads(content)
        except ValueError:
            begun = None
        differences = list_differences(begun if isinstance(begun, dict) else {}, self.plan)
        if differences:
            raise ConfigError(
                f"{self.folder} holds the parts of something else ({'; '.join(differences)}): give the same command as "
                "before, give --out another name, or delete that folder to begin again"
            )


def list_differences(begun: Plan, plan: Plan) -> list[str]:
    """Return in words where two plans differ, such as "top = 5 there, 3 here"."""
    digests = {"model": "another model", "images": "other images"}
    return [
        digests.get(key) or f"{key} = {begun.get(key)} there, {plan.get(key)} here"
        for key in {**plan, **begun}
        if begun.get(key) != plan.get(key)
    ]


def encode_prediction(prediction: FilePrediction) -> str:
    """Return a prediction with everything it holds as a line of JSON."""
    answer, familiarity = prediction.answer, prediction.familiarity
    values = {
        "file": prediction.file,
        "labels": prediction.labels,
        "error": prediction.error,
        "answer": None if answer is None else [answer.task, answer.content, answer.lines, answer.cells],
        "familiarity": None if familiarity is None else [bool(familiarity[0]), *map(float, familiarity[1:])],
    }
    return json.dumps(values)


def decode_prediction(line: bytes) -> FilePrediction:
    """Return the prediction that a line of `encode_prediction` holds.

    Raises:
        ValueError, TypeError, LookupError: the line is damaged.
    """
    values = json.loads(line)
    answer, familiarity = values["answer"], values["familiarity"]
    if answer is not None:
        task, content, lines, cells = answer
        answer = Answer(task, content, tuple(AnswerLine(*each) for each in lines), cells)
    return FilePrediction(
        values["file"],
        tuple((label, share) for label, share in values["labels"]),
        values["error"],
        answer,
        None if familiarity is None else Familiarity(*familiarity),
    )


def _lock_folder(folder: Path, out: Path) -> BinaryIO:
    """Open a file with a lock that one process at a time can hold, if the file system supports locks."""
    try:
        return lock_file(folder / LOCK)
    except BlockingIOError:
        raise ConfigError(f"another process writes {out}: wait for it, or stop it") from None
    except OSError:  # a file system without locks
        return (folder / LOCK).open("ab")
