"""Two nodes in miniature: network namespaces joined by a cable, or two process groups where these cannot be made."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple


class Node(NamedTuple):
    """Where processes of a node run."""

    address: str
    interface: str
    prefix: tuple[str, ...]
    """What comes before a command so that it runs there."""

    def start(self, *command: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on the node, as the leader of a process group."""
        variables = {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface, **environment}
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self.prefix, *command],
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                start_new_session=True,
            )


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Yield two nodes that reach each other."""
    name = f"v{uuid.uuid4().hex[:6]}"
    try:
        yield _join_namespaces(name) or (Node("127.0.0.1", "lo", ()), Node("127.0.0.1", "lo", ()))
    finally:
        for end in "ab":
            _run("ip", "netns", "del", f"{name}{end}")


def _join_namespaces(name: str) -> tuple[Node, Node] | None:
    """Make two network namespaces with a cable between them, or return None if that is not allowed."""
    ends = [f"{name}{end}" for end in "ab"]
    commands = [("ip", "netns", "add", end) for end in ends]
    commands += [("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])]
    for number, end in enumerate(ends, start=1):
        inside = ("ip", "-n", end)
        commands += [("ip", "link", "set", end, "netns", end), (*inside, "link", "set", "lo", "up")]
        commands += [
            (*inside, "address", "add", f"10.77.0.{number}/24", "dev", end),
            (*inside, "link", "set", end, "up"),
        ]
    if not all(_run(*command) for command in commands):
        return None
    one, two = (Node(f"10.77.0.{n}", end, ("ip", "netns", "exec", end)) for n, end in enumerate(ends, start=1))
    return one, two


def _run(*command: str) -> bool:
    with suppress(OSError):
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    return False


def lose(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node at once, its agents and its ranks, as a power cut does."""
    children, seen = [process.pid], list[int]()
    while children:
        pid = children.pop()
        seen.append(pid)
        with suppress(OSError):
            children += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for pid in seen:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
