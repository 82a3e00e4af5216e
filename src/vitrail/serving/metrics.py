"""Count and time requests, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vitrail.serving.batching import BatchTiming

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    """The metrics of one server. All label values come from fixed sets, so no client can add new ones."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._counters: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._requests = Counter("vitrail_requests", "Requests answered.", ["route", "status"], registry=registry)
        self._seconds = Histogram(
            "vitrail_request_seconds",
            "From headers to the end of the answer.",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self._images = Counter("vitrail_images", "Images computed.", ["model"], registry=registry)
        self._sizes = Histogram("vitrail_batch_size", "Images of a batch.", ["model"], buckets=SIZES, registry=registry)
        self._waits = Histogram(
            "vitrail_wait_seconds", "Waiting of an image for its turn.", ["model"], buckets=SECONDS, registry=registry
        )
        self._compute = Histogram(
            "vitrail_compute_seconds", "Computing of a batch.", ["model"], buckets=SECONDS, registry=registry
        )
        self._queue = Gauge("vitrail_queue_length", "Images admitted and not answered.", ["model"], registry=registry)
        self._rejections = Counter(
            "vitrail_rejections", "Requests refused, by the code of the refusal.", ["code"], registry=registry
        )

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request. `route` is one of the server's paths, or "other"."""
        if (route, status) not in self._counters:  # finding a label takes longer than counting
            self._counters[route, status] = self._requests.labels(route, status), self._seconds.labels(route)
        requests, times = self._counters[route, status]
        requests.inc()
        times.observe(seconds)

    def count_rejection(self, code: str) -> None:
        self._rejections.labels(code).inc()

    def track_queue(self, model: str, length: Callable[[], int]) -> None:
        """Report the length of a model's queue, read whenever the metrics are."""
        self._queue.labels(model).set_function(length)

    def batch_observer(self, model: str) -> Callable[[BatchTiming], None]:
        """Return a function that records the batches of a model."""
        images, sizes = self._images.labels(model), self._sizes.labels(model)
        waits, compute = self._waits.labels(model), self._compute.labels(model)

        def observe_batch(batch: BatchTiming) -> None:
            images.inc(len(batch.waits))
            sizes.observe(len(batch.waits))
            compute.observe(batch.compute)
            for seconds in batch.waits:
                waits.observe(seconds)

        return observe_batch

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
