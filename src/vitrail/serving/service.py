"""The models of a server, each with its queue, and what they share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vitrail.errors import did_you_mean
from vitrail.serving.access_log import AccessLog
from vitrail.serving.batching import Batcher
from vitrail.serving.http_errors import HttpError
from vitrail.serving.metrics import ServerMetrics
from vitrail.serving.request_body import BodyReader
from vitrail.serving.served_model import DecodedRequest, ImageRequest, ServedModel
from vitrail.serving.settings import ServerSettings

ModelBatcher = Batcher[ImageRequest, DecodedRequest, Any]


class Service:
    """The models by name, a batcher for each, and one pool of threads that decode.

    `state` is "starting" until all models are warm, then "ready", then "closing".
    """

    def __init__(self, models: Mapping[str, ServedModel], settings: ServerSettings) -> None:
        self.settings = settings
        self.state = "starting"
        self.metrics = ServerMetrics()
        self.access_log = AccessLog(settings.access_log, settings.log_level)
        self.bodies = BodyReader(settings.most_bytes, settings.most_held, settings.body_seconds)
        self.unanswered = 0
        """Number of image requests that were accepted and not answered yet."""
        self.models = dict(models)
        self.default = next(iter(models))
        self.pool = ThreadPoolExecutor(settings.decoders, "decode", initializer=torch.set_num_threads, initargs=(1,))
        self.batchers: dict[str, ModelBatcher] = {}
        for name, model in models.items():
            batcher = self.batchers[name] = Batcher(
                model.decode,
                model.compute,
                self.pool,
                settings.limits,
                self.metrics.batch_observer(name),
                model.engine.enter_thread,
                settings.decoders,
                model.expect_decoding_seconds,
            )
            self.metrics.track_queue(name, lambda batcher=batcher: batcher.in_flight)  # type: ignore[misc]

    async def start(self) -> None:
        """Warm up all models, then accept requests."""
        for name, model in self.models.items():
            seconds = await asyncio.to_thread(model.warm_up, self.settings.limits.batch)
            self.batchers[name].expect_compute_seconds(seconds)
        # Start the decoding threads first: a part of torch's number of threads is global, and theirs would win.
        await asyncio.gather(*(asyncio.wrap_future(self.pool.submit(time.sleep, 0.01)) for _ in range(8)))
        for batcher in self.batchers.values():
            batcher.start()
        if self.state == "starting":
            self.state = "ready"

    async def close(self) -> None:
        """Refuse further requests and finish the accepted ones, within `drain_seconds`."""
        self.state = "closing"
        ends = time.monotonic() + self.settings.drain_seconds
        while self.unanswered and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        for batcher in self.batchers.values():
            batcher.stop_admitting()
        if not self.unanswered:
            await asyncio.gather(*(batcher.close() for batcher in self.batchers.values() if batcher.is_alive))
        self.pool.shutdown(wait=False, cancel_futures=True)

    @property
    def has_failed(self) -> bool:
        """Whether a model has stopped computing although the server is ready."""
        return self.state == "ready" and not all(batcher.is_alive for batcher in self.batchers.values())

    def find_model(self, name: str | None) -> tuple[ServedModel, ModelBatcher]:
        """Return the model of that name and its batcher, the first model if None; raise a 404 for an unknown name."""
        name = name or self.default
        if name not in self.models:
            hint = did_you_mean(name, self.models) or f"; there are {', '.join(self.models)}"
            raise HttpError(404, f"there is no model {name[:100]!r}{hint}", "unknown_model")
        return self.models[name], self.batchers[name]
