"""All that can be set about a server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from vitrail.errors import ConfigError
from vitrail.serving.batching import Limits

LONGEST = 3600.0
"""Seconds that anything here may last."""


def cores() -> int:
    """That this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@dataclass(frozen=True)
class Settings:
    """With its bounds checked."""

    host: str = "127.0.0.1"
    port: int = 8000
    limits: Limits = field(default_factory=Limits)
    """Of each model."""
    token: str | None = None
    """What clients must show, if anything."""
    threads: int = field(default_factory=cores)
    """For each product of a model."""
    most_bytes: int = 20_000_000
    """Of a request's body."""
    most_held: int = 1_000_000_000
    """Bytes of all bodies that are held at a time."""
    most_images: int = 64
    """In one multipart request."""
    body_seconds: float = 30.0
    """In which a body must have arrived."""
    header_seconds: float = 10.0
    """In which headers must have arrived."""
    least_drain: float = 25.0
    """A server that was told to stop does so after so long or the deadline, whatever is unfinished."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ConfigError(f"--port {self.port}: give a number from 1 to 65535")
        batch, wait, queue, deadline = self.limits
        if batch < 1 or queue < batch:
            raise ConfigError(f"--batch {batch}, --queue {queue}: give 1 or more, and a queue that holds a batch")
        if not (0 <= wait <= LONGEST and 0 < deadline <= LONGEST):
            raise ConfigError(
                f"--wait {wait * 1000:g}, --deadline {deadline:g}: give 0 ms or more, and above 0 s; "
                f"neither more than {LONGEST:g} s"
            )
        if self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: give 1 or more")
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError("the token is empty, or has characters that no header can carry: give plain letters")

    @property
    def decoders(self) -> int:
        """Threads that decode: half as many as compute, for each takes memory too."""
        return max(1, min(self.threads // 2, 8))

    @property
    def drain_seconds(self) -> float:
        """After which a server that was told to stop does so, whatever is unfinished."""
        return max(self.least_drain, self.limits.deadline)

    @property
    def images_at_once(self) -> int:
        """In one request: no more than the queue ever holds."""
        return min(self.most_images, self.limits.queue)
