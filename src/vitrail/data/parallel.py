"""Work on every sample of a source in other processes, and answers in order.

Each process has a pipe of its own. When the system kills one, its pipe ends, and nothing waits for it in vain: the
samples it had in hand are then tried one by one, and one that ends the process again is answered with a reason.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError

log = logging.getLogger("vitrail")

Answer = TypeVar("Answer")
Job = Sequence[int]
"""The numbers of some samples."""
IN_HAND = 2
"""Jobs that a process has, so that it need not wait for the next."""
TRIES = 2
DEADLY = "reading it ended the process: killed by the system, perhaps because memory ran out"


def resolve_worker_count(workers: int | None) -> int:
    """So many, or one for each core."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ConfigError(f"workers = {workers}: give at least 1")
    return workers


def exit_with_parent(_: int = 0) -> None:
    """Called in a worker: it ends soon after its parent, however that one ended, whatever it is waiting for.

    A parent killed in the middle of something takes a lock with it that torch's own workers ask for before they look
    whether it is still there: they would stay for ever, with the memory and the open files that they have.
    """
    number, parent = os.getppid(), multiprocessing.parent_process()

    def watch() -> None:
        while os.getppid() == number and (parent is None or parent.is_alive()):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def map_samples(
    work: Callable[[Source, int], Answer], source: Source, jobs: Iterable[Job], workers: int
) -> Generator[tuple[Job, list[Answer | str]]]:
    """Each job with `work(source, index)` of each of its samples, in the order of the jobs.

    A string in the place of an answer says why there is none. No more than a few jobs for each process are under way,
    so memory does not grow, however slowly the answers are taken.
    """
    coming = enumerate(jobs)
    ready: dict[int, tuple[Job, list[Answer | str]]] = {}
    crew = [_Worker(work, source) for _ in range(workers)]
    turn = given = 0
    try:
        for worker in crew:
            worker.greet()
        while True:
            for worker in crew * IN_HAND:
                room = len(worker.in_hand) < IN_HAND and given < turn + IN_HAND * workers
                if room and (job := next(coming, None)):
                    worker.give(*job)
                    given += 1
            if turn in ready:
                turn += 1
                yield ready.pop(turn - 1)
                continue
            if turn == given:
                return
            for pipe in wait([worker.pipe for worker in crew if worker.in_hand]):
                worker = next(worker for worker in crew if worker.pipe is pipe)
                try:
                    number, job_done, answers = worker.take()
                    ready[number] = job_done, answers
                except (EOFError, OSError):
                    log.warning("a process that reads images was ended by the system; its samples are tried again")
                    worker.end()
                    ready.update(_one_by_one(work, source, worker.in_hand))
                    crew[crew.index(worker)] = successor = _Worker(work, source)
                    successor.greet()
    finally:
        for worker in crew:
            worker.end()


class _Worker:
    """A process, the pipe to it, and the jobs it has."""

    def __init__(self, work: Callable[[Source, int], Any], source: Source) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.in_hand: deque[tuple[int, Job]] = deque()
        arguments = (theirs, self.pipe, work, source)
        self.process = multiprocessing.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()  # only the process has it now, so that it ends with it

    def greet(self) -> None:
        """Wait until it has started; the first thing that it sends says so."""
        try:
            self.pipe.recv()
        except (EOFError, OSError):
            raise DataError(
                "processes that read images cannot be started: a script that uses them needs to be guarded by "
                '`if __name__ == "__main__":`, and enough memory'
            ) from None

    def give(self, number: int, job: Job) -> None:
        """One more job."""
        self.in_hand.append((number, job))
        with suppress(OSError):  # where it is dead, which taking will find
            self.pipe.send(job)

    def take(self) -> tuple[int, Job, list[Any]]:
        """The answers to its first job; an EOFError or OSError where it is dead."""
        answers = self.pipe.recv()
        number, job = self.in_hand.popleft()
        return number, job, answers

    def end(self) -> None:
        """Whatever it is doing."""
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _one_by_one(
    work: Callable[[Source, int], Answer], source: Source, jobs: Iterable[tuple[int, Job]]
) -> Iterator[tuple[int, tuple[Job, list[Answer | str]]]]:
    """Jobs with their answers, each sample by itself, so that it is known which one ends a process."""
    worker = _Worker(work, source)
    try:
        worker.greet()
        for number, job in jobs:
            answers: list[Answer | str] = []
            for index in job:
                for attempt in range(TRIES):
                    worker.give(number, [index])
                    try:
                        answers += worker.take()[2]
                        break
                    except (EOFError, OSError):
                        worker.end()
                        worker = _Worker(work, source)
                        worker.greet()
                        if attempt == TRIES - 1:
                            answers.append(DEADLY)
            yield number, (job, answers)
    finally:
        worker.end()


def _serve(pipe: Connection, other_end: Connection, work: Callable[[Source, int], Any], source: Source) -> None:
    """What a process does until its pipe ends."""
    other_end.close()  # a copy of the parent's end: with it open, the parent's end would go unnoticed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked to stop, and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which is how; a fork may have brought a handler along
    torch.set_num_threads(1)
    exit_with_parent()
    try:
        pipe.send(None)
        while True:
            pipe.send([_answer(work, source, index) for index in pipe.recv()])
    except (EOFError, OSError):
        return


def _answer(work: Callable[[Source, int], Answer], source: Source, index: int) -> Answer | str:
    try:
        return work(source, index)
    except DataError as error:
        return " ".join(str(error).split())
    except Exception as error:  # one strange sample is no reason to give up on all others
        return " ".join(f"unexpected {type(error).__name__}: {error}".split())
