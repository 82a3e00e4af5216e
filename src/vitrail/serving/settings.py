"""The settings of a server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from vitrail.data.transforms.decode import MOST_PIXELS_SERVING
from vitrail.errors import ConfigError, did_you_mean
from vitrail.serving.access_log import FORMATS, LEVELS
from vitrail.serving.batching import QueueLimits

TOP, MOST_TOP = 5, 100_000
"""Labels in an answer if the request gives no number, and the largest number it may give."""
LONGEST = 3600.0
"""Largest value of any time limit, in seconds."""


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # missing on some systems
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server, checked on creation.

    Raises:
        ConfigError: if a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    limits: QueueLimits = field(default_factory=QueueLimits)
    """Limits of each model's queue."""
    token: str | None = None
    """Bearer token that clients must send; None if they need none."""
    threads: int = field(default_factory=count_cores)
    """Threads for each matrix product."""
    most_bytes: int = 20_000_000
    """Largest request body, in bytes."""
    most_held: int = 1_000_000_000
    """Largest sum of the bodies held at a time, in bytes."""
    most_images: int = 64
    """Largest number of images in one multipart request."""
    body_seconds: float = 30.0
    """Time within which a body must arrive."""
    header_seconds: float = 10.0
    """Time within which the headers must arrive."""
    access_log: str = "plain"
    """How requests are logged on stderr: "plain", "json" or "off"."""
    log_level: str = "info"
    """Lowest level of the requests that are logged: "debug", "info", "warning" or "error"."""
    least_drain: float = 25.0
    """Seconds that a stopping server waits for unfinished requests; longer if the deadline is longer."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ConfigError(f"port {self.port}: give a number from 1 to 65535")
        batch, wait, queue, deadline = self.limits
        if batch < 1 or queue < batch:
            raise ConfigError(f"batch {batch}, queue {queue}: give 1 or more, and no batch above the queue")
        if not (0 <= wait <= LONGEST and 0 < deadline <= LONGEST):
            raise ConfigError(
                f"wait {wait * 1000:g} ms, deadline {deadline:g} s: give a wait of 0 ms or more and a deadline "
                f"above 0 s, neither longer than {LONGEST:g} s"
            )
        if self.threads < 1:
            raise ConfigError(f"threads {self.threads}: give 1 or more")
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError("the token is empty or has characters that a header cannot carry: use printable ASCII")
        _check_word("access log", self.access_log, FORMATS)
        _check_word("log level", self.log_level, LEVELS)

    @property
    def decoders(self) -> int:
        """Number of threads that decode: half as many as compute, because each takes memory."""
        return max(1, min(self.threads // 2, 8))

    @property
    def drain_seconds(self) -> float:
        """Seconds after which a stopping server ends, even if requests are unfinished."""
        return max(self.least_drain, self.limits.deadline)

    def summarise_limits(self) -> dict[str, float]:
        """Return the limits that clients meet first, by what they count."""
        return {
            "images": self.limits.queue,
            "bytes": self.most_bytes,
            "pixels": MOST_PIXELS_SERVING,
            "seconds": self.limits.deadline,
        }

    @property
    def images_at_once(self) -> int:
        """Largest number of images in one request: never more than the queue holds."""
        return min(self.most_images, self.limits.queue)


def _check_word(name: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ConfigError(f"{name} {word}{did_you_mean(word, known) or ':'} there are {', '.join(known)}")
