"""Session-wide servers for the acceptance tests; each test uses its own users and items."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support import tiny
from tests.support.server import Server


def _serve(world: tiny.World, path: pytest.TempPathFactory, *, trained: bool) -> Iterator[Server]:
    data = world.copy(path.mktemp("served") / "data", trained=trained)
    with Server(data) as server:
        yield server
    assert "Traceback" not in server.log()


@pytest.fixture(scope="session")
def trained(world: tiny.World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The small world, served with its first model."""
    yield from _serve(world, tmp_path_factory, trained=True)


@pytest.fixture(scope="session")
def untrained(world: tiny.World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The small world, served without any model."""
    yield from _serve(world, tmp_path_factory, trained=False)


@pytest.fixture(params=["trained", "untrained"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each of the two in turn."""
    served: Server = request.getfixturevalue(request.param)
    return served


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A client of that server."""
    with server.client() as client:
        yield client
