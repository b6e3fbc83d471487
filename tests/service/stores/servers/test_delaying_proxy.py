"""The proxy that stands for a bad network."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.delaying_proxy import DelayingProxy
from tests.support.postgres_server import PostgresDatabases


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(65536):
            self.request.sendall(data)
        self.request.sendall(b"end")


@pytest.fixture
def proxy() -> Iterator[DelayingProxy]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        with DelayingProxy(server.server_address[1]) as proxy:
            yield proxy
        server.shutdown()


def connect(proxy: DelayingProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=30)


def receive(client: socket.socket, size: int) -> bytes:
    with client.makefile("rb", buffering=0) as file:
        data = b""
        while len(data) < size and (more := file.read(size - len(data))):
            data += more
    return data


def exchange(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return receive(client, len(data))


def is_silent(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(30)
    return False


def test_bytes_pass_in_order_and_ends_too(proxy: DelayingProxy) -> None:
    """Everything comes out as it went in, and a client that has sent its last hears the answer."""
    data = bytes(range(256)) * 4096
    with connect(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        assert receive(client, len(data)) == data
        sender.join()
        client.shutdown(socket.SHUT_WR)
        assert receive(client, 10) == b"end"


def test_a_delay_holds_from_the_next_chunk(proxy: DelayingProxy) -> None:
    """Each direction waits at least as long as it is told, on a connection that was open before."""
    with connect(proxy) as client:
        assert exchange(client, b"at once") == b"at once"
        proxy.flow(delay=0.2)
        began = time.monotonic()
        assert exchange(client, b"later") == b"later"
        assert time.monotonic() - began >= 0.4


def test_stalled_connections_hear_nothing_until_it_flows(proxy: DelayingProxy) -> None:
    """Old and new connections stay open in silence, and lose nothing."""
    with connect(proxy) as old:
        assert exchange(old, b"1") == b"1"
        proxy.stall()
        with connect(proxy) as new:
            old.sendall(b"2")
            new.sendall(b"3")
            assert is_silent(old)
            assert is_silent(new)
            proxy.flow()
            assert (old.recv(1), new.recv(1)) == (b"2", b"3")
    assert proxy.accepted == 2


def test_new_connections_are_refused_and_old_ones_stay(proxy: DelayingProxy) -> None:
    """The port is closed, and is the same once it is open again."""
    with connect(proxy) as old:
        assert exchange(old, b"1") == b"1"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        assert exchange(old, b"2") == b"2"
        proxy.flow()
        with connect(proxy) as new:
            assert exchange(new, b"3") == b"3"


def test_connections_are_cut_and_new_ones_pass(proxy: DelayingProxy) -> None:
    """Open connections are reset, also those that were stalled; the next ones are served."""
    with connect(proxy) as first, connect(proxy) as second:
        assert exchange(first, b"1") == b"1"
        assert exchange(second, b"2") == b"2"
        proxy.stall()
        with connect(proxy) as third:
            while proxy.accepted < 3:
                time.sleep(0.01)
            proxy.cut()
            for client in (first, second, third):
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
        proxy.flow()
        with connect(proxy) as fourth:
            assert exchange(fourth, b"4") == b"4"


def test_an_absent_server_ends_the_connection(proxy: DelayingProxy) -> None:
    """Where nobody listens behind the proxy, its clients are not left waiting."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with DelayingProxy(nobody.getsockname()[1]) as other, connect(other) as client:
            assert client.recv(1) == b""


def test_postgresql_answers_through_it(postgres: PostgresDatabases) -> None:
    """A client of PostgreSQL connects through the proxy, and loses its connection with it."""
    server = urlsplit(postgres.url())
    with (
        DelayingProxy(server.port or 5432, server.hostname or "localhost") as proxy,
        psycopg.connect(proxy.through(postgres.url()), autocommit=True) as connection,
    ):
        assert connection.info.port == proxy.port
        assert connection.execute("SELECT 42").fetchone() == (42,)
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 42")
