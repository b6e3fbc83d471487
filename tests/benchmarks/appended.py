"""The cost of a new event, beside encoding the whole history again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import Snapshot
from models.data.windows import window_start
from models.encoder.event_bias import UNKNOWN
from models.history.user_history import UserHistory, attendable_events
from models.history.user_memory import EncodedHistory, encode
from models.recommender.artifact import TrainedModel
from models.training.presets import PRESET_NAMES, choose_preset
from tests.benchmarks.harness.options import Rounds
from tests.benchmarks.harness.tables import print_machine, seconds, table
from tests.benchmarks.harness.timing import Spread, alternate
from tests.support.untrained import untrained_model

_ITEMS = 1_000
_CONTENT = 256
_MINUTE = 60_000_000
EVENTS = 200  # of the history, before the new one


class AppendResult(NamedTuple):
    """One preset's encoder over a history of `EVENTS` events that gets another."""

    preset: str
    shape: str
    again: Spread  # seconds to encode it from nothing
    ratio: Spread  # one event more, to that
    run: Spread  # the mean of as many events as the window moves by, its move among them, to that
    kept: int  # bytes for the history


def appended(rounds: Rounds = 11) -> None:
    """Measure the cost of a new event of a history, beside encoding all of it again."""
    print_machine("one thread")
    table(
        f"A new event of a history of {EVENTS}: part of the time of encoding it again",
        ("preset", "encoder", "encoding again", "one event", "with the window's moves", "kept"),
        (
            (
                each.preset,
                each.shape,
                seconds(each.again.median),
                _part(each.ratio),
                _part(each.run),
                f"{each.kept / 2**10:.0f} KiB",
            )
            for each in (_measure(name, rounds) for name in PRESET_NAMES)
        ),
        left=2,
        caption="The window moves by a quarter at once, and is then read again.",
    )


def _part(found: Spread) -> str:
    """A ratio below 1, as one over what it is."""
    return f"1/{1 / found.median:.1f} (1/{1 / found.high:.1f}–1/{1 / found.low:.1f})"


def _measure(name: str, rounds: int) -> AppendResult:
    preset = choose_preset(10**6, _ITEMS, name)
    model = untrained_model(_ITEMS, content=_CONTENT, dim=preset.dim, blocks=preset.blocks)
    trained = TrainedModel(
        model, tuple(map(str, range(_ITEMS))), np.ones(_ITEMS, np.int64), "none", {}
    )
    snapshot = Snapshot.build(
        "random", trained, Catalogue.empty(_CONTENT), np.zeros(0, np.int64), index_from=_ITEMS + 1
    )
    window = model.config.window
    step = window_start(window + 1, window)
    whole = _past(EVENTS + step)
    before = _encode(snapshot, _first(whole, EVENTS))
    longer = _first(whole, EVENTS + 1)

    def run() -> None:
        kept: EncodedHistory | None = before
        for length in range(EVENTS + 1, EVENTS + step + 1):
            kept = _encode(snapshot, _first(whole, length), kept)

    timed = alternate(
        {
            "again": lambda: _encode(snapshot, longer),
            "append": lambda: _encode(snapshot, longer, before),
            "run": run,
        },
        rounds,
    )
    through = timed.ratio("run", "again")
    return AppendResult(
        name,
        f"{preset.dim} x {preset.blocks}",
        timed.seconds("again"),
        timed.ratio("append", "again"),
        Spread(*(each / step for each in through)),
        0 if before is None else before.nbytes,
    )


def _past(events: int) -> UserHistory:
    rows = np.random.default_rng(0).integers(0, _ITEMS, events).astype(np.int32)
    types = np.full(events, UNKNOWN, np.int32)
    return UserHistory(rows, np.arange(events) * _MINUTE, np.ones(events, np.float32), types)


def _first(history: UserHistory, events: int) -> UserHistory:
    return UserHistory(
        history.rows[:events],
        history.timestamps[:events],
        history.weights[:events],
        history.types[:events],
    )


@torch.inference_mode()
def _encode(
    snapshot: Snapshot, history: UserHistory, before: EncodedHistory | None = None
) -> EncodedHistory | None:
    return encode(snapshot, history, *attendable_events(snapshot, history), before)
