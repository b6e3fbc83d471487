"""Checks of models and of what is computed from texts."""

from __future__ import annotations

from collections.abc import Iterator

from service.domain.errors import HeedError
from service.domain.timestamps import to_rfc3339
from service.maintenance.doctor.findings import Finding
from service.maintenance.doctor.installation import DAY, Installation, NamespaceData
from service.runtime.data_layout import EMBEDDINGS_FILE, MODELS_FOLDER
from service.snapshots.text_embeddings import is_of_other_encoder
from service.snapshots.version_files import read_files, read_manifest

_OLD_DAYS = 30  # between a model and the newest event
_GROWTH = 2.0  # times the events that a model was trained on


def check_model_files(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find versions of models whose files are not what was published."""
    folder = namespace.data / MODELS_FOLDER / "versions"
    for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            for _name, _content in read_files(directory, read_manifest(directory)):
                pass
        except (HeedError, OSError) as error:
            yield damaged_model(error)


def damaged_model(error: Exception) -> Finding:
    """Return the finding of a version that fails its checks."""
    return Finding(
        "damaged-model",
        "error",
        f"A model version is damaged: {error}.",
        "It cannot be served; if it is the one in use, the service does not start.",
        "Activate another version (heed models list, heed models activate), train again, or "
        "restore a backup. Damage comes from the disk: check it.",
    )


def check_model_age(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find a model that is much older than the log."""
    log, model = namespace.log, namespace.model
    if log is None or model is None or not log.events:
        return
    days = (log.newest - model.manifest.created) / DAY
    trained = int(model.manifest.metadata.get("events", 0))
    if days > _OLD_DAYS or (trained and log.events > _GROWTH * trained):
        yield Finding(
            "old-model",
            "warning",
            f"The model in use is of {to_rfc3339(model.manifest.created)} and {trained:,} events; "
            f"the log has {log.events:,}, the newest of {to_rfc3339(log.newest)}.",
            "It does not know the items and habits that came since.",
            "Train again, with heed train or POST /v1/models/train, and do so regularly.",
        )


def check_encoder(installation: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find a model, or stored embeddings, of another text encoder than the one that is set."""
    encoder, model = installation.encoder, namespace.model
    if encoder is None:
        return
    if model is not None and model.text_encoder != encoder:
        yield Finding(
            "other-encoder",
            "error",
            f"The model in use was trained with the text encoder {model.text_encoder}, and "
            f"HEED_ENCODER selects {encoder}.",
            "The model cannot be served: vectors of different encoders do not compare.",
            "Set HEED_ENCODER as it was at the training, or train again.",
        )
    path = namespace.data / EMBEDDINGS_FILE
    items = 0 if namespace.log is None else namespace.log.items
    if path.exists() and is_of_other_encoder(path, encoder):
        yield Finding(
            "other-embeddings",
            "warning",
            f"{path} holds vectors of another text encoder than {encoder}.",
            "All texts are encoded again at the next start, which can take long.",
            "Set HEED_ENCODER as it was, or start the service once when there is time.",
        )
    elif items and not path.exists() and model is not None and installation.server is None:
        yield Finding(
            "missing-embeddings",
            "warning",
            f"{path} is missing, and the catalogue has {items:,} items.",
            "All texts are encoded at the next start, which can take long.",
            "Start the service once when there is time; check that the directory is writable.",
        )


MODEL_CHECKS = (check_model_age, check_encoder)
