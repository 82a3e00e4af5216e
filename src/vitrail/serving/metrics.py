"""What is counted and measured, in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vitrail.serving.batching import Batch

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Of one server. Labels come from closed sets: no client can make them grow."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        kept = self.registry
        self._counters: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._requests = Counter("vitrail_requests", "Requests answered.", ["route", "status"], registry=kept)
        self._seconds = Histogram(
            "vitrail_request_seconds",
            "From headers to the end of the answer.",
            ["route"],
            buckets=SECONDS,
            registry=kept,
        )
        self._images = Counter("vitrail_images", "Images computed.", ["model"], registry=kept)
        self._sizes = Histogram("vitrail_batch_size", "Images of a batch.", ["model"], buckets=SIZES, registry=kept)
        self._waits = Histogram(
            "vitrail_wait_seconds", "Waiting of an image for its turn.", ["model"], buckets=SECONDS, registry=kept
        )
        self._compute = Histogram(
            "vitrail_compute_seconds", "Computing of a batch.", ["model"], buckets=SECONDS, registry=kept
        )
        self._inside = Gauge("vitrail_queue_length", "Images admitted and not answered.", ["model"], registry=kept)
        self._rejections = Counter(
            "vitrail_rejections", "Requests refused, by the code of the refusal.", ["code"], registry=kept
        )

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request is over. `route` is one of ours, or "other"."""
        if (route, status) not in self._counters:  # looking labels up takes longer than counting
            self._counters[route, status] = self._requests.labels(route, status), self._seconds.labels(route)
        requests, times = self._counters[route, status]
        requests.inc()
        times.observe(seconds)

    def refused(self, code: str) -> None:
        """One that was told so."""
        self._rejections.labels(code).inc()

    def queue(self, model: str, length: Callable[[], int]) -> None:
        """Ask `length` whenever somebody looks."""
        self._inside.labels(model).set_function(length)

    def watching(self, model: str) -> Callable[[Batch], None]:
        """What a model's batcher tells of its batches."""
        images, sizes = self._images.labels(model), self._sizes.labels(model)
        waits, compute = self._waits.labels(model), self._compute.labels(model)

        def watch(batch: Batch) -> None:
            images.inc(len(batch.waits))
            sizes.observe(len(batch.waits))
            compute.observe(batch.compute)
            for seconds in batch.waits:
                waits.observe(seconds)

        return watch

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self.registry)
