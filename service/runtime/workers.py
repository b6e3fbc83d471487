"""Worker processes that share a port: forked, watched and replaced by a parent; their messages."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from service.runtime.logs import log_failure

BEAT_INTERVAL = 1.0  # seconds
STALLED = 5.0  # seconds without a beat, after which peers do not wait for a worker


class WorkerRow(NamedTuple):
    """One worker number. Times are of the monotonic clock, the same in all processes."""

    is_running: bool
    started: float  # of its latest process; 0.0 before the first
    restarts: int
    beat: float = 0.0  # the last heartbeat of that process; 0.0 before its first


class WorkerTable:
    """One row for each worker, in shared memory; create it before the workers are forked.

    The event loop of a worker beats, so that a worker whose process is stopped or whose loop is
    blocked falls silent. Unlike a pipe, shared memory needs no reader: a slow parent holds up
    nobody.
    """

    def __init__(self, count: int) -> None:
        columns = len(WorkerRow._fields)
        self._rows = np.frombuffer(mmap.mmap(-1, 8 * count * columns)).reshape(count, columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> WorkerRow:
        running, started, restarts, beat = self._rows[number].tolist()
        return WorkerRow(bool(running), started, int(restarts), beat)

    def start(self, number: int) -> None:
        """Note that a process of this worker is about to start."""
        restarts = self._rows[number, 2] + (self._rows[number, 1] > 0)
        self._rows[number] = 1, time.monotonic(), restarts, 0.0

    def end(self, number: int) -> None:
        """Note that the process of this worker has ended."""
        self._rows[number, 0] = 0

    def beat(self, number: int) -> None:
        """Note that a worker is alive now."""
        self._rows[number, 3] = time.monotonic()

    def is_stalled(self, number: int) -> bool:
        """True for a worker that does not serve now: silent for a while, ended, or starting."""
        return time.monotonic() - self[number].beat > STALLED

    async def keep_beating(self, number: int) -> None:
        while True:
            self.beat(number)
            await asyncio.sleep(BEAT_INTERVAL)


_log = logging.getLogger(__name__)

_MAX_REQUEST = 128  # bytes
_START_TIME = 30.0  # seconds that a new worker may take to listen
_STALL_POLL = 0.2  # seconds between two looks whether a worker that is waited for has stalled

# By the first word of a request; called with the second, the name of a namespace.
MessageHandlers = Mapping[str, Callable[[str], Awaitable[bytes]]]


def worker_sockets(count: int) -> list[socket.socket]:
    """Return a listening socket for each worker; create them before the workers are forked.

    Linux gives them abstract names: no files that would have to be removed.
    """
    sockets = []
    for _ in range(count):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.bind("")
        one.listen()
        sockets.append(one)
    return sockets


class WorkerPeers:
    """The other workers, from the view of one worker.

    `number` is the index of its own among the `worker_sockets`. A peer that has stalled is not
    waited for.
    """

    def __init__(self, sockets: Sequence[socket.socket], number: int, table: WorkerTable) -> None:
        self._sockets = sockets
        self.number = number
        self.table = table

    async def listen(self, handlers: MessageHandlers) -> asyncio.Server:
        """Answer requests of the other workers until the returned server is closed."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                request = (await reader.read(_MAX_REQUEST)).decode("ascii")
                kind, _, name = request.partition(" ")
                writer.write(await handlers[kind](name))
                await writer.drain()
            except ConnectionError:
                _log.debug("a worker did not wait for its answer", exc_info=True)
            except Exception as error:  # noqa: BLE001 - the other worker goes on without the answer
                log_failure(_log, "a request of another worker failed", error)
            finally:
                writer.close()

        # A duplicate: the server closes its socket, whose name a restarted worker needs again.
        return await asyncio.start_unix_server(serve, sock=self._sockets[self.number].dup())

    async def ask(self, request: str, patience: float) -> dict[int, bytes]:
        """Ask all other workers; return the answers, by number, that came within `patience` s.

        A worker that has stalled is left out: it answers nobody. Should it go on, it reads by
        itself what the others had to say.
        """
        others = [number for number in range(len(self._sockets)) if number != self.number]
        answers = await asyncio.gather(*(self._ask_alive(one, request, patience) for one in others))
        return {number: answer for number, answer in zip(others, answers, strict=True) if answer}

    async def silent(self, patience: float) -> list[int]:
        """Return the workers that have run for a while and do not answer within `patience` s.

        A worker that is being started again is not among them: it takes no connections.
        """
        established = time.monotonic() - _START_TIME
        asked = [
            number
            for number in range(len(self._sockets))
            if number != self.number
            and self.table[number].is_running
            and self.table[number].started < established
        ]
        answers = await asyncio.gather(*(self._ask(one, "ping", patience) for one in asked))
        return [number for number, answer in zip(asked, answers, strict=True) if not answer]

    async def _ask_alive(self, number: int, request: str, patience: float) -> bytes:
        """Ask one worker for as long as its heart beats."""
        asking = asyncio.ensure_future(self._ask(number, request, patience))
        try:
            while not asking.done():
                if self.table.is_stalled(number):
                    _log.warning("worker %d is not waited for: it does not serve now", number)
                    return b""
                await asyncio.wait([asking], timeout=_STALL_POLL)
            return asking.result()
        finally:
            asking.cancel()

    async def _ask(self, number: int, request: str, patience: float) -> bytes:
        """Ask one worker; the answer is empty where it was not reached."""
        loop = asyncio.get_running_loop()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
                one.setblocking(False)
                async with asyncio.timeout(patience):
                    await loop.sock_connect(one, self._sockets[number].getsockname())
                    await loop.sock_sendall(one, request.encode("ascii"))
                    parts = []
                    while part := await loop.sock_recv(one, 1 << 16):
                        parts.append(part)
            return b"".join(parts)
        except OSError as error:
            reason = f"silent for {patience:g} s" if isinstance(error, TimeoutError) else str(error)
            _log.warning("worker %d was not reached: %s", number, reason)
            return b""


_STOP = (signal.SIGTERM, signal.SIGINT)
_AWAITED = (*_STOP, signal.SIGCHLD)
_MIN_DELAY, _MAX_DELAY = 0.5, 30.0  # seconds before a worker that died early is started again
_EARLY = 10.0  # seconds after its start within which a worker's death is early
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(slots=True)
class _Slot:
    """One worker number, taken by one process after the other."""

    number: int
    pid: int = 0  # 0: no process runs
    started: float = 0.0  # 0: no process has run yet
    due: float = 0.0  # when the next process starts
    delay: float = 0.0  # the backoff after the last early death
    beat: float = 0.0  # the last that was seen
    silent: float = 0.0  # seconds since then, in which this process ran


class PreforkServer:
    """Runs a process for each row of a table, all with the same work, until SIGTERM or SIGINT.

    The process must be single-threaded: it forks, at the start and whenever a worker has died.

    Args:
        work: called in each worker with its number, and whether it is the first process of that
            number; the process ends when it returns. It handles SIGTERM and SIGINT itself.
        grace: seconds between SIGTERM to the workers and SIGKILL.
        table: of the workers. `work` keeps their heartbeats up once it serves.
        patience: seconds without a heartbeat after which a worker is killed and replaced.
    """

    def __init__(
        self,
        work: Callable[[int, bool], None],
        *,
        grace: float,
        table: WorkerTable,
        patience: float,
    ) -> None:
        self._slots = [_Slot(number) for number in range(len(table))]
        self._work = work
        self._grace = grace
        self._patience = patience
        self._table = table
        self._looked = time.monotonic()
        self._mask: set[int | signal.Signals] = set()  # of signals, before `run`

    def run(self) -> None:
        """Start the workers; return when all have ended after SIGTERM or SIGINT."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        try:
            while True:
                for slot in self._slots:
                    if not slot.pid and time.monotonic() >= slot.due:
                        self._start(slot)
                if self._wait_for_signal(min(BEAT_INTERVAL, self._next_start())) in _STOP:
                    break
                self.kill_hung()
                self._reap()
        finally:
            self._stop()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _next_start(self) -> float:
        """Return the seconds until the next worker is due, an hour when all are running."""
        due = [slot.due for slot in self._slots if not slot.pid]
        return max(0.0, min(due) - time.monotonic()) if due else 3600.0

    @staticmethod
    def _wait_for_signal(seconds: float) -> int | None:
        received = signal.sigtimedwait(_AWAITED, seconds)
        return None if received is None else received.si_signo

    def _start(self, slot: _Slot) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent, first = os.getpid(), not slot.started
        slot.started, slot.beat, slot.silent = time.monotonic(), 0.0, 0.0
        self._table.start(slot.number)
        slot.pid = os.fork()
        if not slot.pid:
            self._run_worker(slot.number, first, parent)

    def _run_worker(self, number: int, first: bool, parent: int) -> None:
        """Do the work in the forked process; does not return."""
        code = 1
        try:
            # A worker must not outlive the parent that restarts and stops it.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            if os.getppid() == parent:
                self._work(number, first)
            code = 0
        except KeyboardInterrupt:
            pass
        except BaseException:  # noqa: BLE001 - logged; the next process may succeed
            _log.exception("worker %d failed", number)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # An ordinary exit would touch, and so copy, every object in shared memory.
            os._exit(code)

    def kill_hung(self) -> None:
        """Kill the workers that have been silent for too long; they are reaped like others.

        Only time in which this process ran counts: a paused machine stops parent and workers alike,
        and a worker that loads has not begun to beat. Called about once in `BEAT_INTERVAL`.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * BEAT_INTERVAL), now
        for slot in self._slots:
            last, slot.beat = slot.beat, self._table[slot.number].beat
            slot.silent = slot.silent + passed if slot.beat == last else 0.0
            if slot.pid and slot.beat and slot.silent >= self._patience:
                _log.error(
                    "worker %d (process %d) hangs: no heartbeat for %.0f s; it is killed",
                    slot.number,
                    slot.pid,
                    slot.silent,
                )
                os.kill(slot.pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Log the workers that have ended, and schedule their successors."""
        for slot, pid, code in self._ended():
            now = time.monotonic()
            early = now - slot.started < _EARLY
            slot.delay = min(_MAX_DELAY, max(_MIN_DELAY, 2 * slot.delay)) if early else 0.0
            slot.due = now + slot.delay
            _log.error(
                "worker %d (process %d) %s; the next one starts %s",
                slot.number,
                pid,
                f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}",
                f"in {slot.delay:g} s" if slot.delay else "now",
            )

    def _ended(self) -> list[tuple[_Slot, int, int]]:
        """Reap all ended children; return the slot, process id and exit code of each worker.

        As the first process of a container, this one also inherits orphans: they are reaped only.
        """
        ended: list[tuple[_Slot, int, int]] = []
        slots = {slot.pid: slot for slot in self._slots if slot.pid}
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = child
                if pid in slots:
                    slots[pid].pid = 0
                    self._table.end(slots[pid].number)
                    ended.append((slots[pid], pid, os.waitstatus_to_exitcode(status)))
        return ended

    def _stop(self) -> None:
        """Send SIGTERM to all workers, wait, and kill those that do not end within the grace."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while any(slot.pid for slot in self._slots):
            left = deadline - time.monotonic()
            if left <= 0:
                _log.error("workers that did not stop within %g s are killed", self._grace)
                self._signal_all(signal.SIGKILL)
                deadline += self._grace
            if self._wait_for_signal(max(0.0, min(left, 1.0))) == signal.SIGINT:
                self._signal_all(signal.SIGINT)  # after a second Ctrl-C, workers stop at once
            self._ended()

    def _signal_all(self, number: signal.Signals) -> None:
        for slot in self._slots:
            if slot.pid:
                os.kill(slot.pid, number)


class ShutdownLimit:
    """Ends the process `seconds` after `start`, whatever it is still doing.

    Nothing that was acknowledged is lost by it: an acknowledged change is on disk, and one that is
    not has been refused or has no client left. It is a thread of its own, because the event loop, a
    pool's queue, the store's writer or a checkpoint may be what does not end.

    `abandon` is called before the end, to kill child processes. It must not wait.
    """

    def __init__(self, seconds: float, *, abandon: Callable[[], None]) -> None:
        self._seconds = seconds
        self._abandon = abandon
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Begin to count; later calls change nothing."""
        if self._timer is None:
            self._timer = threading.Timer(self._seconds, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            _log.warning(
                "not stopped within %g s: the process ends with work left, all of it "
                "unacknowledged; the next start goes on from what is stored",
                self._seconds,
            )
            self._abandon()
            sys.stdout.flush()
            sys.stderr.flush()
        # A stop on request is a success; `sys.exit` would wait for threads.
        os._exit(0)


_ALIGNMENT = 64  # bytes


class SharedArrays:
    """Named arrays in a file in memory, published once; create it before the processes are forked.

    A process claims the file before it makes the arrays. The claim ends with the process, so that
    another one can make them where the first was killed.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("heed-shared", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        # Bytes of the published arrays, behind which their description stands.
        self._size = memoryview(mmap.mmap(-1, 8)).cast("q")

    @property
    def is_published(self) -> bool:
        """True once `arrays` can be called."""
        return bool(self._size[0])

    def claim(self) -> bool:
        """Try to become the process that makes the arrays; `release` ends the claim.

        False while another process has claimed them, and once they are published.
        """
        try:
            # A POSIX lock, which belongs to the process: forked ones share the open file.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        if self.is_published:
            self.release()
            return False
        return True

    def release(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def publish(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Publish the arrays, under the claim. Raises OSError where memory is missing."""
        os.ftruncate(self._file, 0)  # of a process that was killed
        described, end = {}, _ALIGNMENT
        for name, array in arrays.items():
            described[name] = (array.dtype.str, array.shape, end)
            self._write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._write(memoryview(orjson.dumps(described)), end)
        self._size[0] = end

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the published arrays, which cannot be written to and take no memory of their own.

        Raises RuntimeError before they are published.
        """
        if not self.is_published:
            raise RuntimeError("not published")
        end = self._size[0]
        described = orjson.loads(os.pread(self._file, os.fstat(self._file).st_size - end, end))
        mapping = mmap.mmap(self._file, end, access=mmap.ACCESS_READ)
        return {
            name: np.ndarray(shape, np.dtype(kind), mapping, offset)
            for name, (kind, shape, offset) in described.items()
        }

    def _write(self, data: memoryview, place: int) -> None:
        while len(data):
            written = os.pwrite(self._file, data, place)
            data, place = data[written:], place + written
