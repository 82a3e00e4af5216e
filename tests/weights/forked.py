"""Code in processes of their own, without importing torch every time: one process has it, and each is a fork of that.

What else is imported, and what it then reads from the environment, is each one's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def forks() -> Iterator[subprocess.Popen[str]]:
    """The process that others are forks of."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run(
    process: subprocess.Popen[str], code: str, arguments: list[str], environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """The code in a fork, with some of its environment changed; what it prints passes through files in a folder."""
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    asked = {"code": code, "arguments": arguments, "environment": environment, "out": str(out), "err": str(err)}
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asked) + "\n")
    process.stdin.flush()
    ended = int(process.stdout.readline())
    return subprocess.CompletedProcess(code, ended, out.read_text(), err.read_text())


def child(asked: dict[str, object]) -> None:
    """What a fork does. It never returns."""
    code = 1
    try:
        os.environ.update(asked["environment"])  # type: ignore[call-overload]
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(str(asked[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
        sys.argv = ["-c", *asked["arguments"]]  # type: ignore[misc]
        exec(str(asked["code"]), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Fork for every line on standard input, one after the other, and answer with its exit code."""
    import httpx  # noqa: F401  # what takes long to import, short of the hub's own library

    import vitrail.weights.load  # noqa: F401

    for line in sys.stdin:
        number = os.fork()
        if not number:
            child(json.loads(line))
        _, status = os.waitpid(number, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
