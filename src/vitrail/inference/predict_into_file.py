"""Predict into a file: the ranks share the parts, and the first rank joins what is done, in order, as it comes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vitrail import __version__
from vitrail.errors import ConfigError, DataError, TrainingError
from vitrail.inference.answer_images import AnsweredImage, AnswerOptions, answer_images
from vitrail.inference.answers import list_cell_names
from vitrail.inference.embedding_files import write_embeddings
from vitrail.inference.engine import FloatArray
from vitrail.inference.find_images import FoundImage
from vitrail.inference.prediction_parts import FORMS, Plan, PredictionParts, list_differences
from vitrail.inference.prediction_result import FilePrediction, PredictionResult
from vitrail.inference.prediction_rows import RowFormat, choose_format, has_answer
from vitrail.inference.predictor import Predictor
from vitrail.system.events import OnEvent, send_progress
from vitrail.system.files import move_into_place
from vitrail.system.ranks import Ranks, explain_lost_rank

TIMEOUT = 24 * 3600.0
"""Seconds that a rank waits for the others: the first may have done its share long before the last."""
SHARED_SECONDS = 60.0
"""How long a file that another machine wrote may take to appear here."""


def require_files(found: Sequence[FoundImage]) -> None:
    """Raise a ConfigError if an image is no file: a later call could not tell whether it is the same."""
    other = next((image for image in found if not isinstance(image.content, str)), None)
    if other is not None:
        raise ConfigError(f"--out is for images in files, and {other.name} is none: give the names of files")


def predict_into_file(
    predictor: Predictor,
    found: Sequence[FoundImage],
    options: AnswerOptions,
    out: Path,
    embedding_path: Path | None,
    ranks: Ranks,
    listener: OnEvent,
) -> PredictionResult:
    """Predict the images into a file, as much of it as is not done yet.

    Returns:
        The predictions for all images on the first rank, none on the others.

    Raises:
        ConfigError: the file cannot be written, or something else was begun.
        TrainingError: another rank was lost.
    """
    started = time.perf_counter()
    plan = make_plan(predictor, found, options)
    parts = PredictionParts(out, plan, len(found), predictor.batch_size)
    with _explain_lost_rank(ranks):
        _check_same_on_all_ranks(plan, ranks)
        try:
            share = _claim_parts(parts, _open_on_all_ranks(parts, ranks), ranks)
            if not ranks.is_first:
                _answer_parts(predictor, found, options, parts, share)
                ranks.wait()
                return PredictionResult((), predictor.labels, time.perf_counter() - started, out=out)
            with closing(_PartJoiner(parts, _choose_format(predictor, options, out), listener)) as joiner:
                joiner.join_ready()
                _answer_parts(predictor, found, options, parts, share, joiner.count_image, joiner.join_ready)
                ranks.wait(joiner.join_ready)
                joiner.join_rest()
            rows = None
            if options.embeds:
                rows = _collect_embeddings(predictor, parts, joiner.predictions, embedding_path)
            with parts.explain_disk_errors():
                move_into_place(parts.draft, out)
            parts.discard()
        finally:
            parts.close()
    is_used = any(each.error is None for each in joiner.predictions)  # else no file of embeddings is written
    return PredictionResult(
        tuple(joiner.predictions),
        predictor.labels,
        time.perf_counter() - started,
        embedding_path if is_used else None,
        rows,
        out,
        joiner.done_before,
    )


def make_plan(predictor: Predictor, found: Sequence[FoundImage], options: AnswerOptions) -> Plan:
    """Return everything that decides the predictions, as plain data."""
    engine, images, model = predictor.engine, hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for image in found:
        images.update(os.fsencode(str(image.content)) + b"\0")
    facts = [engine.compute_digest(), predictor.task.model_dump_json(), json.dumps(predictor.labels)]
    if engine.reliability is not None and (options.coverage is not None or options.unknown):
        facts.append(engine.reliability.model_dump_json())
    model.update("\0".join(facts).encode())
    return {
        "version": __version__,
        "model": model.hexdigest(),
        "images": f"{len(found)} {images.hexdigest()}",
        **options._asdict(),
        "batch_size": predictor.batch_size,
        "precision": engine.precision,
        "device": engine.device.type,
    }


def _check_same_on_all_ranks(plan: Plan, ranks: Ranks) -> None:
    differences = list_differences(ranks.broadcast_from_first(plan), plan)
    differing = next((each for each in ranks.gather(differences) if each), None)
    if differing:
        raise ConfigError(
            f"the ranks differ from the first one ({'; '.join(differing)}): give all of them the same images, "
            "model and options, and a precision other than auto"
        )


def _open_on_all_ranks(parts: PredictionParts, ranks: Ranks) -> list[int]:
    """Open the folder on the first rank, and return the numbers of the parts to do on all of them."""
    problem: str | None = None
    remaining: list[int] = []
    if ranks.is_first:
        try:
            parts.open()
            remaining = sorted(set(range(parts.count)) - parts.find_done())
        except ConfigError as error:
            problem = str(error)
    problem, remaining = ranks.broadcast_from_first((problem, remaining))
    if problem is not None:
        raise ConfigError(problem)
    if ranks.size > 1 and ranks.any(not _wait_until(parts.is_begun)):
        raise ConfigError(f"--out {parts.out}: give a file in a folder that all machines share")
    return remaining


def _wait_until(is_so: Callable[[], bool]) -> bool:
    """Wait until something is so, for a minute at most; return whether it is."""
    give_up = time.monotonic() + SHARED_SECONDS
    while not (found := is_so()) and time.monotonic() < give_up:
        time.sleep(0.2)
    return found


def _claim_parts(parts: PredictionParts, remaining: Sequence[int], ranks: Ranks) -> Iterator[int]:
    """Yield the numbers of this rank's parts, in order: one for each rank, then whichever no other rank has taken.

    A rank that is faster than others therefore does more of them, as the first one, which also joins them, does fewer.
    """
    yield from remaining[ranks.rank : ranks.rank + 1]
    for number in remaining[ranks.size :]:
        if ranks.size == 1 or parts.claim(number):
            yield number


def _answer_parts(
    predictor: Predictor,
    found: Sequence[FoundImage],
    options: AnswerOptions,
    parts: PredictionParts,
    share: Iterable[int],
    on_image: Callable[[], None] = lambda: None,
    on_part: Callable[[], None] = lambda: None,
) -> None:
    """Compute parts and write them. Every part but the last of all is some whole batches, so no batch has two parts."""
    begun = deque[int]()

    def read_images() -> Iterator[FoundImage]:
        for number in share:
            begun.append(number)
            yield from (found[index] for index in parts.list_images(number))

    answered = list[AnsweredImage]()
    with closing(answer_images(predictor, read_images(), options)) as answers:
        for answer in answers:
            answered.append(answer)
            on_image()
            if len(answered) == len(parts.list_images(begun[0])):
                parts.write(begun.popleft(), answered)
                answered = []
                on_part()


class _PartJoiner:
    """Joins the parts that are done, in order, and tells of each image and of the progress of all ranks."""

    def __init__(self, parts: PredictionParts, row_format: RowFormat, listener: OnEvent) -> None:
        self.parts, self.lines, self.listener = parts, row_format.lines, listener
        self.predictions: list[FilePrediction] = []
        self.done_before = 0
        """Images that were used, of the parts that an earlier call had done."""
        self._progress = send_progress(listener, "predicting")
        self._done, self._told_done = 0, -1
        """Images that are done on all ranks, and the last number of them that was told."""
        self._next = 0
        """The number of the first part that is not joined."""
        self._begun = parts.find_done()
        with parts.explain_disk_errors():
            self._file: BinaryIO = parts.draft.open("wb")
        if row_format.heading is not None:
            self._write([row_format.heading])

    def close(self) -> None:
        self._file.close()

    def count_image(self) -> None:
        """Tell that this rank has computed an image."""
        self._tell_progress(self._done + 1)

    def join_ready(self) -> None:
        """Join the parts that are done, up to the first that is not."""
        self._tell_progress(sum(len(self.parts.list_images(number)) for number in self.parts.find_done()))
        while self._next < self.parts.count and (rows := self.parts.read(self._next)) is not None:
            self._join(rows)
            self._next += 1

    def join_rest(self) -> None:
        """Join all that is left. What another machine wrote may appear late."""

        def is_joined() -> bool:
            self.join_ready()
            return self._next == self.parts.count

        if not _wait_until(is_joined):
            raise DataError(f"{self.parts.folder} lacks a part that was written: give the same command again")
        with self.parts.explain_disk_errors():
            self._file.close()

    def _join(self, rows: Sequence[FilePrediction]) -> None:
        for prediction in rows:
            row = prediction.to_dict()
            if has_answer(row):
                self._write(self.lines(row))
            self.listener("prediction", row)
        self.predictions += rows
        if self._next in self._begun:
            self.done_before += sum(each.error is None for each in rows)

    def _write(self, lines: Iterable[str]) -> None:
        with self.parts.explain_disk_errors():
            self._file.writelines(f"{line}\n".encode() for line in lines)

    def _tell_progress(self, done: int) -> None:
        self._done = done
        if done != self._told_done:
            self._told_done = done
            self._progress(done, self.parts.images)


def _choose_format(predictor: Predictor, options: AnswerOptions, out: Path) -> RowFormat:
    has_labels = predictor.engine.has_labels or not predictor.labels
    columns = None if has_labels else list_cell_names(predictor.task)
    chosen = choose_format(FORMS[out.suffix.lower()], columns, options.unknown)
    return chosen if predictor.labels else chosen._replace(heading=None)


def _collect_embeddings(
    predictor: Predictor, parts: PredictionParts, predictions: Sequence[FilePrediction], path: Path | None
) -> FloatArray | None:
    """Write the embeddings of all parts into a file; without a file return them, (N, D)."""
    kept = [np.empty((0, predictor.engine.embedding_size or 0), np.float32)]
    with nullcontext() if path is None else write_embeddings(path) as add:
        for number in range(parts.count):
            names = [predictions[index].file for index in parts.list_images(number) if predictions[index].error is None]
            rows = parts.read_embeddings(number, len(names))
            if add is None:
                kept += [rows] if names else []
            else:
                for name, row in zip(names, rows, strict=True):
                    add(name, row)
    return np.concatenate(kept) if path is None else None


@contextmanager
def _explain_lost_rank(ranks: Ranks) -> Iterator[None]:
    """Turn the failure of another rank into a TrainingError that says what to do next."""
    try:
        yield
    except RuntimeError as error:
        if ranks.size > 1 and (reason := explain_lost_rank(error)):
            raise TrainingError(
                f"rank {ranks.rank}: {reason}; the same command goes on with what is not done"
            ) from None
        raise
