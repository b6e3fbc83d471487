"""The registry of model versions that suits a store."""

from __future__ import annotations

from pathlib import Path

from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.registry import Registry
from service.snapshots.versions.shared_registry import KIND, SharedRegistry
from service.stores.base import Store


def open_registry(data: Path, store: Store | None = None) -> Registry:
    """Open the registry of a data directory.

    Args:
        data: the data directory, of one namespace.
        store: of the namespace. Where several machines share it, they share the models; without a
            store, those on this disk are meant.
    """
    shared = None if store is None else store.shared
    if shared is None:
        return Registry(data / MODELS_FOLDER)
    return SharedRegistry(data / MODELS_FOLDER, shared.files(KIND))
