"""A child process in a group of its own, read line by line and never left behind."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, cast

_DRAIN = 5.0  # seconds to wait for pipes that someone outside the group keeps open


class Lines:
    """Cuts a stream of bytes into lines of text. Of a line past `limit` bytes the head is kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line = bytearray()

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that `data` completes."""
        *complete, rest = data.split(b"\n")
        for part in complete:
            self._grow(part)
            yield from self.flush()
        self._grow(rest)

    def flush(self) -> Iterator[str]:
        """The line as far as it came; none when it is blank."""
        line = self._line.decode("utf-8", "replace").rstrip()
        self._line.clear()
        if line:
            yield line

    def _grow(self, part: bytes) -> None:
        self._line += part[: self._limit - len(self._line)]


class Child(asyncio.SubprocessProtocol):
    """A running process, whose stdout and stderr go to two callbacks, line by line.

    A protocol rather than streams: `Process.wait` of the latter waits until the pipes are closed,
    which a grandchild can put off for ever.
    """

    def __init__(self, out: Callable[[str], None], err: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self._transport: asyncio.SubprocessTransport
        self._exited: asyncio.Future[None] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()
        self._pipes = {1: (Lines(1 << 20), out), 2: (Lines(1 << 13), err)}

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        *,
        out: Callable[[str], None],
        err: Callable[[str], None],
        environment: Mapping[str, str],
        inherit: Sequence[int] = (),
        nice: int = 0,
    ) -> Self:
        """Start `argv`, without a shell, in a session of its own.

        Args:
            environment: laid over that of this process.
            inherit: descriptors that the child keeps open, such as a lock.
            nice: what is added to the niceness of this process.

        Raises:
            OSError, ValueError: it could not be started.
        """
        _, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(out, err),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
            pass_fds=tuple(inherit),
            start_new_session=True,
        )
        # From here and not in a preexec_fn, which may deadlock in a process with threads.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PGRP, child.pid, min(19, own + nice))
        return child

    @property
    def pid(self) -> int:
        """Of the process, and of its group and session."""
        return self._transport.get_pid()

    async def exited(self, seconds: float) -> bool:
        """Wait for at most `seconds`; True when the process has ended."""
        await asyncio.wait([self._exited], timeout=seconds)
        return self._exited.done()

    async def stop(self, grace: float) -> None:
        """SIGTERM to the group, SIGKILL after `grace` seconds; returns when it has ended."""
        self._signal(signal.SIGTERM)
        if not await self.exited(grace):
            self.kill()
            await self._exited

    def kill(self) -> None:
        """SIGKILL to the group, at once."""
        self._signal(signal.SIGKILL)

    async def finish(self) -> int:
        """Wait for the end, take the group's stragglers along, read what is left in the pipes.

        Returns: the exit code, or minus the signal that killed it.
        """
        await self._exited
        # The number of a group is not given away while it has members, and if it has none there
        # was no time to give it away.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.wait([self._drained], timeout=_DRAIN)
        self._transport.close()
        await asyncio.wait([self._drained], timeout=_DRAIN)
        for lines, callback in self._pipes.values():
            for line in lines.flush():
                callback(line)
        code = self._transport.get_returncode()
        return -1 if code is None else code

    def _signal(self, number: signal.Signals) -> None:
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by the loop."""
        lines, callback = self._pipes[fd]
        for line in lines.feed(data):
            callback(line)

    def process_exited(self) -> None:
        """Called by the loop."""
        if not self._exited.done():
            self._exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        """Called by the loop."""
        if not self._drained.done():
            self._drained.set_result(None)


def kill_holders(path: Path) -> None:
    """SIGKILL the processes outside our session that have `path` open. Without /proc, nobody.

    By what it holds and not by a number written down earlier: numbers are used again, and mean
    something else in another container.
    """
    target = path.stat()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or not ours
            if os.getsid(int(entry.name)) != os.getsid(0) and any(
                _is(descriptor, target) for descriptor in (entry / "fd").iterdir()
            ):
                os.kill(int(entry.name), signal.SIGKILL)


def _is(path: Path, target: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), target)
    except OSError:
        return False
