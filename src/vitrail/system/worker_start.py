"""Worker processes that are started by spawn, as on Windows and macOS: such a worker first runs the script again.

A script without `if __name__ == "__main__":` would then train in every worker, and start workers there. `leave_worker`
ends such a worker where it calls vitrail, and `UNGUARDED`, its exit code, tells the parent why.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import DataError
from vitrail.system.files import MANY_FILES, is_out_of_handles

UNGUARDED = 78
"""Exit code of a worker that ran a script without a guard."""
NO_WORKERS = (
    "processes that read images cannot be started: on Windows and macOS each of them runs your script again, so put "
    'what the script does under `if __name__ == "__main__":`, or give workers=0 (data.workers=0 for a training), which '
    "reads images in this process; if the script has this line, there may be too little memory"
)

DEFINE_ELSEWHERE = (
    "define the class of the source in a module of its own, neither in a notebook nor in a function, or give workers=0 "
    "(data.workers=0 for a training)"
)
NOT_RECEIVED = f"the processes that read images ended before they had begun, for the reason above: {DEFINE_ELSEWHERE}"


def leave_worker() -> None:
    """End this process if it is a worker that has not started yet, and only runs the script of its parent again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # Python's own mark, for the same purpose
        raise SystemExit(UNGUARDED)


@contextmanager
def explain_start() -> Iterator[None]:
    """Turn the errors of a process that does not start into a DataError that says what to do."""
    try:
        yield
    except (EOFError, OSError) as error:
        if is_out_of_handles(error):
            raise DataError(f"processes that read images cannot be started: {MANY_FILES}") from None
        raise DataError(NO_WORKERS) from None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "pickle" not in str(error) and "local object" not in str(error):
            raise
        raise DataError(
            f"these images cannot be sent to the processes that read them ({error}): {DEFINE_ELSEWHERE}"
        ) from None


@contextmanager
def start_workers() -> Iterator[None]:
    """Let processes start also from a script that is no file, and explain in a DataError why they do not.

    Python gives a script from standard input the file name "<stdin>", which a worker would look for.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    is_no_file = script is not None and getattr(main, "__spec__", None) is None and not Path(script).exists()
    if is_no_file:
        del main.__file__
    try:
        with explain_start():
            yield
    finally:
        if is_no_file:
            main.__file__ = script
