"""Run the app in granian: listen, warm up, and shut down without losing a request.

granian closes connections whose headers are too slow or too long. It speaks only HTTP/1.1 here, as load balancers do.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from vitrail.errors import ConfigError
from vitrail.serving.app import build_app
from vitrail.serving.served_model import ServedModel
from vitrail.serving.service import Service
from vitrail.serving.settings import ServerSettings
from vitrail.system.files import describe_reason

Stop = Callable[[bool], None]
"""Stops the server; called in its thread, with whether a person interrupted it."""

MOST_HEADER_BYTES = 65_536
CONNECTIONS = 4096
"""Largest number of open connections: enough that slow clients do not keep others out."""
FLUSH_SECONDS = 0.1
"""Seconds in which the last answers leave."""
WAKE_SECONDS = 0.5
"""Seconds after which a notebook's interrupt is noticed at the latest. The system may give it to another thread,
which does not wake the one that waits; on Windows nothing does."""
NOT_READY_SECONDS = 1.0
"""Seconds in which a stopping server still answers that it is not ready, so that a load balancer notices."""


def run_server(
    models: Mapping[str, ServedModel], settings: ServerSettings, on_ready: Callable[[], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the accepted requests and return.

    In a notebook, "interrupt" stops it. In a thread of its own it serves until the process ends.

    `on_ready` is called once, when the models are warm and requests are accepted.
    """
    check_port(settings.host, settings.port)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(_run_server(models, settings, on_ready, _stop_at_signals))
    else:  # a notebook's cells run inside an event loop, which cannot run another
        _run_in_thread(models, settings, on_ready)


def _stop_at_signals(stop: Stop) -> None:
    if threading.current_thread() is threading.main_thread():  # others get no signals
        loop = asyncio.get_running_loop()
        for number, is_interrupt in ((signal.SIGTERM, False), (signal.SIGINT, True)):
            try:
                loop.add_signal_handler(number, stop, is_interrupt)
            except NotImplementedError:  # Windows
                signal.signal(number, partial(_stop_soon, loop, stop, is_interrupt))


def _stop_soon(loop: asyncio.AbstractEventLoop, stop: Stop, is_interrupt: bool, *signal_details: object) -> None:
    loop.call_soon_threadsafe(stop, is_interrupt)


def _run_in_thread(
    models: Mapping[str, ServedModel], settings: ServerSettings, on_ready: Callable[[], None] | None
) -> None:
    """Serve in another thread, and wait for it; a KeyboardInterrupt here stops it."""
    stops: list[Callable[[], object]] = []

    def keep(stop: Stop) -> None:
        loop = asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stop, True))

    with ThreadPoolExecutor(1, "serve") as pool:
        serving = pool.submit(asyncio.run, _run_server(models, settings, on_ready, keep))
        while True:
            try:
                while not wait({serving}, WAKE_SECONDS).done:
                    pass
                return serving.result()
            except BaseException as error:
                if serving.done():  # it came from the server, or from `on_ready`
                    raise
                for stop in stops:
                    stop()
                if not isinstance(error, KeyboardInterrupt):
                    raise


async def _run_server(
    models: Mapping[str, ServedModel],
    settings: ServerSettings,
    on_ready: Callable[[], None] | None,
    connect: Callable[[Stop], None],
) -> None:
    """Serve until the function is called that `connect` gets."""
    stopped = asyncio.Event()
    is_interrupted = False

    def stop(is_interrupt: bool) -> None:
        nonlocal is_interrupted
        is_interrupted = is_interrupt
        stopped.set()

    connect(stop)
    logging.getLogger("_granian").setLevel(logging.WARNING)
    service = Service(models, settings)
    server = Server(
        build_app(service),
        address=settings.host,
        port=settings.port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        backlog=CONNECTIONS,
        backpressure=CONNECTIONS,
        http1_settings=HTTP1Settings(
            header_read_timeout=int(settings.header_seconds * 1000), max_buffer_size=MOST_HEADER_BYTES
        ),
        log_enabled=False,
    )
    listening = asyncio.create_task(server.serve())
    starting = asyncio.create_task(service.start())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({listening, starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if starting.done() and not listening.done():
            starting.result()  # raises if a model could not be warmed up
            if on_ready is not None:
                on_ready()
            await asyncio.wait({listening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not listening.done():
            await asyncio.wait({starting})
            await service.close()
            # After SIGTERM a load balancer may still ask; after Ctrl-C or an error nobody does.
            await asyncio.sleep(NOT_READY_SECONDS if stopped.is_set() and not is_interrupted else FLUSH_SECONDS)
            server.stop()
        await listening
        service.access_log.close()
    await starting


def check_port(host: str, port: int) -> None:
    """Raise a ConfigError if the address cannot be listened on; granian's own message says less."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = describe_reason(error)
        message = f"{host}:{port} cannot be listened on ({reason}): give another host or port (--host, --port)"
        raise ConfigError(message) from None
