"""The memory of whoever asks: what is kept of it between questions, and held during one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from models.catalogue.snapshot import Snapshot
from models.history.attention_options import CROSSOVER, AttentionOptions, Crossover
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from service.domain.queries import Requester
from service.histories.crossover import measure
from service.histories.encodings import Encodings
from service.histories.error_audit import ErrorAudit
from service.histories.event_cache import EventColumns
from service.histories.long_histories import LongHistories
from service.histories.remembered import Remembered
from service.histories.request_history import RequestHistory, attention_options, version_of


class MemoryProvider:
    """Makes memories, from caches that may be dropped at any time without changing an answer.

    Args:
        exact_up_to: rows up to which `auto` attends exactly, where no cells are at hand.
        encoding_cache_bytes: for what the encoder keeps of histories.
        memory_cache_bytes: for memories as they were asked for last.
        long_history_bytes: for the older events of long histories.
        max_error: of answers over those, where a request does not say.
        check_share: of such answers that are computed again exactly.
    """

    def __init__(
        self,
        *,
        exact_up_to: int,
        encoding_cache_bytes: int,
        memory_cache_bytes: int,
        long_history_bytes: int,
        max_error: float,
        check_share: float,
    ) -> None:
        self.exact_up_to = exact_up_to
        self._max_error = max_error
        self.encodings = Encodings(encoding_cache_bytes)
        self.remembered = Remembered(memory_cache_bytes)
        self.long = LongHistories(long_history_bytes)
        self.audit = ErrorAudit(check_share)
        self._crossover = CROSSOVER
        self._nobody: tuple[Snapshot | None, UserMemory | None] = (None, None)

    def measure(self) -> Crossover:
        """Find from how many items on cells are used here; until then it is a guess."""
        self._crossover = measure()
        return self._crossover

    def options(self, requester: Requester) -> AttentionOptions:
        """How an requester's memory is attended."""
        return attention_options(requester, self.exact_up_to, self._crossover, self._max_error)

    def asked(
        self, snapshot: Snapshot, requester: Requester, stored: EventColumns | None
    ) -> RequestHistory | None:
        """What an requester did, where a memory of it is kept; else it has to be put together."""
        return self.remembered.asked(snapshot, version_of(requester, stored))

    @contextmanager
    def of(
        self, snapshot: Snapshot, requester: Requester, asked: RequestHistory, at: int
    ) -> Iterator[UserMemory]:
        """The memory of an requester, as it is until the block ends.

        Args:
            snapshot: the model and the catalogue.
            requester: how it is attended; only the plain softmax can do with collapsed events.
            asked: what they did.
            at: the request's time, microseconds UTC.
        """
        if asked.empty:
            yield self._nobodys(snapshot)
            return
        plain = requester.temperature == 1 and not requester.hard
        older = self.long.of(snapshot, asked, at) if plain else None
        with nullcontext() if older is None else older.lock:
            if older is not None and older.count > len(asked.history.rows):
                older = None  # it grew meanwhile, by more than this question knows of
            user = self.remembered.get(snapshot, asked, at) if older is None else None
            if user is None:
                user = self.encodings.remember(snapshot, asked, at, older)
                if older is None:
                    self.remembered.put(snapshot, asked, user)
            yield user

    def _nobodys(self, snapshot: Snapshot) -> UserMemory:
        """The memory without anything in it, made once for each snapshot."""
        known, memory = self._nobody
        if known is not snapshot or memory is None:
            memory = build_memory(snapshot, UserHistory.empty(), 0)
            self._nobody = (snapshot, memory)
        return memory

    def stats(self) -> Mapping[str, float]:
        """Numbers worth a gauge."""
        return {
            "cached_encodings": float(len(self.encodings)),
            "cached_encoding_bytes": float(self.encodings.nbytes),
            "cached_memories": float(len(self.remembered)),
            "cached_memory_bytes": float(self.remembered.nbytes),
            "long_histories": float(len(self.long)),
            "long_history_bytes": float(self.long.nbytes),
            "long_histories_waiting_for_cells": float(self.long.making),
        }

    def close(self) -> None:
        """Stop the work beside requests."""
        self.long.close()
        self.audit.close()
