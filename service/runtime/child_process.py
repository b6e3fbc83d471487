"""A child process in a session of its own, whose output is read line by line; no orphan is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, SubprocessStreamProtocol
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

_DRAIN_TIMEOUT = 5.0  # seconds to wait for pipes that a process outside the group keeps open
_CHUNK = 1 << 16  # bytes
_MAX_LINE = 1 << 20  # bytes of a line that are kept


class _Streams(SubprocessStreamProtocol):
    """Streams of a process whose end is an event of its own.

    `asyncio.subprocess.Process.wait` may wait until the pipes are closed, which a grandchild can
    delay for ever.
    """

    def __init__(self) -> None:
        super().__init__(limit=_CHUNK, loop=asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set()


class ChildProcess:
    """A running process, whose stdout and stderr go to two callbacks, line by line."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        ended: asyncio.Event,
        readers: Sequence[asyncio.Task[None]],
    ) -> None:
        self._transport = transport
        self._ended = ended
        self._readers = readers

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        *,
        on_stdout: Callable[[str], None],
        on_stderr: Callable[[str], None],
        environment: Mapping[str, str],
        inherit: Sequence[int] = (),
        nice: int = 0,
    ) -> Self:
        """Start `argv`, without a shell, in a session of its own.

        Args:
            argv: the program and its arguments.
            on_stdout: called with each line of the standard output.
            on_stderr: called with each line of the standard error.
            environment: variables added to those of this process.
            inherit: descriptors that the child keeps open, such as a lock.
            nice: increment to the niceness of this process.

        Raises:
            OSError, ValueError: it could not be started.
        """
        transport, streams = await asyncio.get_running_loop().subprocess_exec(
            _Streams,
            *argv,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, **environment},
            pass_fds=tuple(inherit),
            start_new_session=True,
        )
        readers = [
            asyncio.create_task(_read_lines(stream, callback))
            for stream, callback in ((streams.stdout, on_stdout), (streams.stderr, on_stderr))
            if stream is not None
        ]
        child = cls(transport, streams.ended, readers)
        # Not in a preexec_fn, which may deadlock in a process with threads.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PGRP, child.pid, min(19, own + nice))
        return child

    @property
    def pid(self) -> int:
        """Id of the process, its group and its session."""
        return self._transport.get_pid()

    async def exited(self, seconds: float) -> bool:
        """Wait for at most `seconds`; True when the process has ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        return self._ended.is_set()

    async def stop(self, grace: float) -> None:
        """Send SIGTERM to the group, SIGKILL after `grace` seconds; return when it has ended."""
        self._signal(signal.SIGTERM)
        if not await self.exited(grace):
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """Send SIGKILL to the group."""
        self._signal(signal.SIGKILL)

    async def finish(self) -> int:
        """Wait for the end, kill what is left of the group, and read what is left in the pipes.

        Returns:
            int: the exit code, or minus the number of the signal that ended the process.
        """
        await self._ended.wait()
        # The id of a group is not reused while it has members; without members there was no time
        # to reuse it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.wait(self._readers, timeout=_DRAIN_TIMEOUT)
        self._transport.close()
        await asyncio.wait(self._readers)
        code = self._transport.get_returncode()
        return -1 if code is None else code

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


async def _read_lines(stream: asyncio.StreamReader, callback: Callable[[str], None]) -> None:
    """Pass each line of text to `callback`, without blank ones; keep the head of overlong lines."""
    rest = b""
    while data := await stream.read(_CHUNK):
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[:_MAX_LINE]
        for line in lines:
            _pass_on(line, callback)
    _pass_on(rest, callback)


def _pass_on(line: bytes, callback: Callable[[str], None]) -> None:
    if text := line[:_MAX_LINE].decode("utf-8", "replace").rstrip():
        callback(text)


def kill_holders(path: Path) -> None:
    """Kill the processes outside this session that have `path` open; a no-op without /proc.

    They are found by what they hold open, not by a recorded process id: ids are reused, and differ
    between containers.
    """
    target = path.stat()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if os.getsid(int(entry.name)) != os.getsid(0) and any(
                _is_same_file(descriptor, target) for descriptor in (entry / "fd").iterdir()
            ):
                os.kill(int(entry.name), signal.SIGKILL)


def _is_same_file(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False
