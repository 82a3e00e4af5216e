"""Apply a function to all samples of a source in several processes; results come back in order.

Each process has its own pipe, which closes when the system kills the process. Its samples are then tried one by one. A
sample that ends the process again gets a reason instead of a result.
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
from vitrail.system.files import describe_os_error, is_out_of_handles
from vitrail.system.worker_start import explain_start, start_workers

log = logging.getLogger("vitrail")

Result = TypeVar("Result")
Job = Sequence[int]
"""The numbers of some samples."""
Progress = Callable[[int, int], None]
"""Called with the number of finished samples and the number of all samples."""
JOBS_PER_PROCESS = 2
"""A process has the next job before it finishes one, so that it need not wait."""
ATTEMPTS = 2
KILLED = "reading it ended the process: killed by the system, perhaps because memory ran out"


def resolve_worker_count(workers: int | None) -> int:
    """Return the requested number of processes, or one per core if None."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ConfigError(f"workers = {workers}: give at least 1")
    return workers


def exit_with_parent(_: int = 0) -> None:
    """Watch the parent process from a worker, and exit soon after the parent has ended.

    A parent that is killed may hold a lock that torch's workers wait for before they check whether it still exists.
    Without this watch they would stay forever and keep their memory and open files.
    """
    number, parent = os.getppid(), multiprocessing.parent_process()

    def watch() -> None:
        while os.getppid() == number and (parent is None or parent.is_alive()):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def map_samples(
    work: Callable[[Source, int], Result], source: Source, jobs: Iterable[Job], workers: int
) -> Generator[tuple[Job, list[Result | str]]]:
    """Yield each job with `work(source, index)` for each of its samples, in the order of the jobs.

    A string in place of a result is the reason why there is none. Each process has at most a few jobs at a time, so
    memory does not grow, however slowly the results are used.

    Raises:
        DataError: The processes cannot be started, or can open no more files.
    """
    numbered_jobs = enumerate(jobs)
    ready: dict[int, tuple[Job, list[Result | str]]] = {}
    pool = [_Worker(work, source) for _ in range(workers)]
    turn = submitted = 0
    try:
        for worker in pool:
            worker.wait_until_ready()
        while True:
            for worker in pool * JOBS_PER_PROCESS:
                room = len(worker.jobs) < JOBS_PER_PROCESS and submitted < turn + JOBS_PER_PROCESS * workers
                if room and (job := next(numbered_jobs, None)):
                    worker.submit(*job)
                    submitted += 1
            if turn in ready:
                turn += 1
                yield ready.pop(turn - 1)
                continue
            if turn == submitted:
                return
            for pipe in wait([worker.pipe for worker in pool if worker.jobs]):
                worker = next(worker for worker in pool if worker.pipe is pipe)
                try:
                    number, job_done, results = worker.receive()
                    ready[number] = job_done, results
                except (EOFError, OSError):
                    log.warning("a process that reads images was ended by the system; its samples are tried again")
                    worker.stop()
                    ready.update(_retry_one_by_one(work, source, worker.jobs))
                    pool[pool.index(worker)] = successor = _Worker(work, source)
                    successor.wait_until_ready()
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """A process, the pipe to it, and its jobs."""

    def __init__(self, work: Callable[[Source, int], Any], source: Source) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.jobs: deque[tuple[int, Job]] = deque()
        arguments = (theirs, self.pipe, work, source)
        self.process = multiprocessing.Process(target=_run_process, args=arguments, daemon=True)
        with start_workers():
            self.process.start()
        theirs.close()  # now only the process has this end, so that it closes with the process

    def wait_until_ready(self) -> None:
        """Wait for the first message, which the process sends when it has started."""
        with explain_start():
            self.pipe.recv()

    def submit(self, number: int, job: Job) -> None:
        self.jobs.append((number, job))
        with suppress(OSError):  # the process is dead; `receive` will notice
            self.pipe.send(job)

    def receive(self) -> tuple[int, Job, list[Any]]:
        """Return the results of the oldest job; raise an EOFError or OSError if the process is dead."""
        results = self.pipe.recv()
        if isinstance(results, DataError):  # it had too many files open
            raise results
        number, job = self.jobs.popleft()
        return number, job, results

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _retry_one_by_one(
    work: Callable[[Source, int], Result], source: Source, jobs: Iterable[tuple[int, Job]]
) -> Iterator[tuple[int, tuple[Job, list[Result | str]]]]:
    """Yield jobs with their results, one sample at a time, to find the sample that ends the process."""
    worker = _Worker(work, source)
    try:
        worker.wait_until_ready()
        for number, job in jobs:
            results: list[Result | str] = []
            for index in job:
                for attempt in range(ATTEMPTS):
                    worker.submit(number, [index])
                    try:
                        results += worker.receive()[2]
                        break
                    except (EOFError, OSError):
                        worker.stop()
                        worker = _Worker(work, source)
                        worker.wait_until_ready()
                        if attempt == ATTEMPTS - 1:
                            results.append(KILLED)
            yield number, (job, results)
    finally:
        worker.stop()


def _run_process(pipe: Connection, other_end: Connection, work: Callable[[Source, int], Any], source: Source) -> None:
    """Work in a process until the pipe closes."""
    other_end.close()  # a copy of the parent's end: if it stayed open, the death of the parent would go unnoticed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal too and stops this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # that is how it stops it; a fork may have copied a handler
    torch.set_num_threads(1)
    exit_with_parent()
    try:
        pipe.send(None)
        while True:
            pipe.send(_work_through(work, source, pipe.recv()))
    except (EOFError, OSError):
        return


def _work_through(work: Callable[[Source, int], Result], source: Source, job: Job) -> list[Result | str] | DataError:
    """Return the results of a job, or the error that says nothing about its samples but ends all work."""
    try:
        return [_work_safely(work, source, index) for index in job]
    except OSError as error:
        return DataError(describe_os_error(error))


def _work_safely(work: Callable[[Source, int], Result], source: Source, index: int) -> Result | str:
    try:
        return work(source, index)
    except DataError as error:
        return " ".join(str(error).split())
    except Exception as error:  # one strange sample must not stop all others
        if is_out_of_handles(error):
            raise
        return " ".join(f"unexpected {type(error).__name__}: {error}".split())
