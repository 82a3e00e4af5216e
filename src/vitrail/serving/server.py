"""The process that listens: granian around the app, warm-up, and an end that loses nothing.

granian closes connections whose headers come too slowly or are too long, and speaks HTTP/1.1 only: that is what a
balancer speaks to what is behind it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from vitrail.errors import ConfigError
from vitrail.serving.app import Service, build_app
from vitrail.serving.models import Served
from vitrail.serving.settings import Settings

MOST_HEADER_BYTES = 65_536
CONNECTIONS = 4096
"""At a time; the slow ones among them must not keep others out."""
LAST_BYTES = 0.1
"""Seconds for the last answers to leave."""
TELL_BALANCER = 1.0
"""Seconds during which a server that is about to end still answers that it is not ready."""


def serve(models: Mapping[str, Served], settings: Settings, ready: Callable[[], None] | None = None) -> None:
    """Answer until SIGTERM or SIGINT; then finish what was accepted, and return. `ready` is called once it is."""
    check_free(settings.host, settings.port)
    asyncio.run(_serve(models, settings, ready))


async def _serve(models: Mapping[str, Served], settings: Settings, ready: Callable[[], None] | None) -> None:
    stop = asyncio.Event()
    by_hand = False
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        nonlocal by_hand
        by_hand = True
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupted)
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
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({listening, starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done() and not listening.done():
        starting.result()  # a model that cannot be warmed is an error here
        if ready is not None:
            ready()
        await asyncio.wait({listening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not listening.done():
        await starting
        await service.close()
        await asyncio.sleep(LAST_BYTES if by_hand else TELL_BALANCER)  # who is at the keyboard has no balancer to tell
        server.stop()
    await listening


def check_free(host: str, port: int) -> None:
    """A sentence is better than what the server says where a port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error.strerror}): give another --host or --port"
        ) from None
