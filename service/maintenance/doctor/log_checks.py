"""Checks of the event log: is it what a model can learn from?"""

from __future__ import annotations

from collections.abc import Iterator

from models.data.interactions import DISLIKE, NEGATIVE
from service.domain.timestamps import to_rfc3339
from service.maintenance.doctor.findings import Finding
from service.maintenance.doctor.installation import Installation, NamespaceData

_FEW = 100  # events; of fewer, shares say nothing
_SKEWED = 0.5  # share of the largest user
_ALIKE = 0.9  # share of the largest item
_HEAVY = 1_000  # times the mean weight
_RATINGS = 10  # largest value of a usual scale of ratings


def check_unknown_items(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find events whose items are not in the catalogue."""
    log = namespace.log
    if log is not None and log.unknown_item_events:
        share = log.unknown_item_events / log.events
        yield Finding(
            "unknown-items",
            "warning" if share > 0.01 else "note",
            f"{log.unknown_item_events:,} of {log.events:,} events ({share:.0%}) are of items that "
            "are not in the catalogue.",
            "These items are never recommended, and have no text that a model could use.",
            "Import the items with heed import items, or check that both exports spell item_id "
            "alike.",
        )


def check_only_dislikes(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find a log that has no event but dislikes and returns."""
    log = namespace.log
    if log is not None and log.events and set(log.events_by_type) <= NEGATIVE:
        yield Finding(
            "only-dislikes",
            "warning",
            f"All {log.events:,} events are of type {' or '.join(sorted(log.events_by_type))}.",
            "Nothing says what anybody likes, so that no model can be trained.",
            "Check type and --dislikes-below of the import; heed import --undo ID takes it back.",
        )


def check_untrained_types(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find types of events that the model in use was not trained on."""
    log, model = namespace.log, namespace.model
    if log is None or model is None:
        return
    if unknown := sorted(set(log.events_by_type) - {*model.event_types, *NEGATIVE}):
        count = sum(log.events_by_type[name] for name in unknown)
        yield Finding(
            "untrained-types",
            "warning",
            f"The model in use was not trained on events of type {', '.join(unknown)} "
            f"({count:,} events).",
            "It does not know what they mean.",
            "Train again (heed train), or check the spelling of the type in what sends events.",
        )


def check_users_alike(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find a log in which one user, or one item, has nearly all events."""
    log = namespace.log
    if log is None or log.events < _FEW:
        return
    if log.largest_user > _SKEWED * log.events:
        yield Finding(
            "one-user",
            "warning",
            f"One user has {log.largest_user:,} of {log.events:,} events.",
            "A shared id (a guest, a crawler, an empty cell) drowns what people do.",
            "Send an id of each visitor, or leave these events out of the import.",
        )
    if log.largest_item > _ALIKE * log.events:
        yield Finding(
            "one-item",
            "warning",
            f"One item has {log.largest_item:,} of {log.events:,} events.",
            "Users who all did the same cannot be told apart.",
            "Check that item_id is mapped to the item's own column.",
        )


def check_times(installation: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find times that are all equal, and times of the future."""
    log = namespace.log
    if log is None:
        return
    if log.events >= _FEW and log.oldest == log.newest:
        yield Finding(
            "equal-times",
            "warning",
            f"All {log.events:,} events have the time {to_rfc3339(log.newest)}.",
            "Without times, the order of events means nothing: no trends, no evaluation by time.",
            "Map timestamp to a column of the export and import it again.",
        )
    if log.future_events:
        yield Finding(
            "future-events",
            "warning",
            f"{log.future_events:,} events are later than tomorrow, the newest of "
            f"{to_rfc3339(log.newest)}; this machine's clock shows {to_rfc3339(installation.now)}.",
            "They never count for a request of now, and spoil popularity and trends.",
            "Check the clocks (timedatectl) and --time-format and --timezone of the import.",
        )


def check_weights(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find weights that are amounts or ratings, rather than degrees of interest."""
    log = namespace.log
    if log is None or log.events < _FEW:
        return
    if log.largest_weight > _HEAVY * log.mean_weight:
        yield Finding(
            "heavy-weights",
            "warning",
            f"The largest weight is {log.largest_weight:,g}, the mean {log.mean_weight:,.3g}.",
            "Few events outweigh all others: the weights look like amounts or numbers of articles.",
            "Import them with --weight-from COLUMN:log, or without weights.",
        )
    whole = all(2 * weight == int(2 * weight) for weight in log.weights)
    if (
        len(log.weights) >= 4
        and whole
        and log.weights[-1] <= _RATINGS
        and DISLIKE not in log.events_by_type
    ):
        yield Finding(
            "ratings-as-weights",
            "warning",
            f"The weights are {', '.join(f'{weight:g}' for weight in log.weights)}: they look like "
            "ratings.",
            "A bad rating would count as a little interest instead of as a dislike.",
            "Import them as ratings, with --dislikes-below.",
        )


LOG_CHECKS = (
    check_unknown_items,
    check_only_dislikes,
    check_untrained_types,
    check_users_alike,
    check_times,
    check_weights,
)
