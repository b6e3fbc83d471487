"""The app behind a real uvicorn server: paths, body limits and shutdown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Literal, cast

import httpx
import pytest
import uvicorn

from service.domain.errors import Invalid
from service.domain.settings import Settings
from service.engine.engine import Engine
from service.http.app import create_app
from service.http.server import _bind_all, _told, configure
from tests.support.http_fake import FakeEngine

Protocol = Literal["h11", "httptools"]
Talk = Callable[[httpx.AsyncClient, uvicorn.Server], Awaitable[None]]


async def serve(engine: FakeEngine, protocol: Protocol, talk: Talk, **settings: Any) -> None:
    """Run uvicorn on a free port, run `talk` against it, and shut it down."""
    app = create_app(Settings(embedding_dim=4, **settings), engine=cast(Engine, engine))
    config = uvicorn.Config(app, port=0, http=protocol, lifespan="on", log_config=None)
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn offers nothing to wait for
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            await talk(http, server)
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, 20)


@pytest.fixture(params=["h11", "httptools"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    name: Protocol = request.param
    return name


def test_ids_survive_a_real_server(protocol: Protocol) -> None:
    """Percent-encoded ids reach the app unchanged through a real server."""
    engine = FakeEngine()

    async def talk(http: httpx.AsyncClient, _: uvicorn.Server) -> None:
        for item_id, path in [
            ("a/b", "a%2Fb"),
            ("a/similar", "a%2Fsimilar"),
            ("100%", "100%25"),
            ("%2F", "%252F"),
            ("é\n", "%C3%A9%0A"),
        ]:
            stored = await http.post("/v1/items", json={"items": [{"item_id": item_id}]})
            assert stored.status_code == 200
            answer = await http.get(f"/v1/items/{path}")
            assert answer.json()["item_id"] == item_id
        assert (await http.get("/v1/items/%FF")).status_code == 422

    asyncio.run(serve(engine, protocol, talk))


def test_shutdown_answers_requests_in_flight(protocol: Protocol) -> None:
    """A request in flight is answered before the server shuts down."""
    engine = FakeEngine()

    async def talk(http: httpx.AsyncClient, server: uvicorn.Server) -> None:
        engine.gate = asyncio.Event()
        working = asyncio.create_task(http.post("/v1/score", json={"item_ids": ["a"]}))
        await engine.arrived.acquire()
        server.should_exit = True
        await asyncio.sleep(0.2)  # uvicorn looks at the order every tenth of a second
        assert not engine.closed
        engine.gate.set()
        assert (await working).status_code == 200

    asyncio.run(serve(engine, protocol, talk, deadline=30))
    assert engine.closed


def test_shutdown_does_not_wait_for_ever() -> None:
    """A request that never ends is cut off once `drain_timeout` is over."""
    engine = FakeEngine()
    engine.gate = asyncio.Event()  # never set
    settings = Settings(embedding_dim=4, port=0, drain_timeout=0, deadline=30)
    app = create_app(settings, engine=cast(Engine, engine))

    async def scenario() -> None:
        server = uvicorn.Server(configure(app, settings))
        running = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  # uvicorn offers nothing to wait for
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            stuck = asyncio.create_task(http.post("/v1/score", json={"item_ids": ["a"]}))
            await engine.arrived.acquire()
            server.should_exit = True
            await asyncio.wait_for(running, 10)
            assert (await stuck).status_code == 500

    asyncio.run(scenario())
    assert engine.closed


def test_an_address_that_cannot_be_bound_says_what_to_do() -> None:
    """The port, and the options that give another one; never an errno."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for shared in (False, True):
            with pytest.raises(Invalid, match=rf"^port {port} is in use: .* --port or HEED_PORT$"):
                _bind_all("127.0.0.1", port, shared=shared)
    with pytest.raises(Invalid, match=r"^192\.0\.2\.1 is no address of this machine: .*HEED_HOST"):
        _bind_all("192.0.2.1", 0, shared=False)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_service_on_every_address_names_none_that_cannot_be_opened(host: str) -> None:
    """A container publishes its port under an address that only its host knows."""
    assert _told(host, 8000)[0] == "port 8000 of every address"
    assert _told("::1", 8000) == ("on http://[::1]:8000", "http://[::1]:8000")
