"""A child process in a session of its own, whose output is read line by line; no orphan is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, cast

_DRAIN_TIMEOUT = 5.0  # seconds to wait for pipes that a process outside the group keeps open
_MAX_LINE = 1 << 20  # bytes of a line that are kept


class ChildProcess(asyncio.SubprocessProtocol):
    """A running process, whose stdout and stderr go to two callbacks, line by line.

    `asyncio.subprocess.Process` is no base for it: its `wait` may wait until the pipes are closed,
    which a grandchild can delay for ever.
    """

    def __init__(self, on_stdout: Callable[[str], None], on_stderr: Callable[[str], None]) -> None:
        self._callbacks = {1: on_stdout, 2: on_stderr}
        self._rest = {1: b"", 2: b""}  # of each pipe, since its last newline
        self._ended = asyncio.Event()
        self._closed = asyncio.Event()  # ended, with both pipes closed

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        *,
        on_stdout: Callable[[str], None],
        on_stderr: Callable[[str], None],
        environment: Mapping[str, str],
        inherit: Sequence[int],
        nice: int,
    ) -> Self:
        """Start `argv`, without a shell, in a session of its own.

        The child adds `environment` to the variables of this process and `nice` to its niceness,
        and keeps the descriptors in `inherit` open, such as a lock.

        Raises:
            OSError, ValueError: it could not be started.
        """
        _, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(on_stdout, on_stderr),
            *argv,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, **environment},
            pass_fds=tuple(inherit),
            start_new_session=True,
        )
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
        self._signal(signal.SIGKILL)

    async def finish(self) -> int:
        """Wait for the end, kill what is left of the group, and read what is left in the pipes.

        Returns the exit code, or minus the number of the signal that ended the process.
        """
        await self._ended.wait()
        # The id of a group is not reused while it has members; without members there was no time
        # to reuse it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), _DRAIN_TIMEOUT)
        self._transport.close()
        await self._closed.wait()
        code = self._transport.get_returncode()
        return -1 if code is None else code

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    # asyncio.SubprocessProtocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Pass on whole lines."""
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        self._rest[fd] = rest[:_MAX_LINE]
        for line in lines:
            self._pass_on(fd, line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """Pass on a last line that has no newline."""
        self._pass_on(fd, self._rest.pop(fd))

    def process_exited(self) -> None:
        self._ended.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Note the end of the process and of its pipes."""
        self._closed.set()

    def _pass_on(self, fd: int, line: bytes) -> None:
        """Pass on a line of text unless it is blank; of an overlong one, the head."""
        if text := line[:_MAX_LINE].decode("utf-8", "replace").rstrip():
            self._callbacks[fd](text)


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
