"""Model versions as JSON values, in the form of the API."""

from __future__ import annotations

from typing import Any

from service.domain.timestamps import to_rfc3339
from service.snapshots.registry import Version


def version_document(version: Version) -> dict[str, Any]:
    """Return the public fields of a model version."""
    metadata = dict(version.metadata or {})
    return {
        "version": version.version,
        "current": version.current,
        "created": None if version.created is None else to_rfc3339(version.created),
        "bytes": version.size,
        "metrics": metadata.pop("metrics", None),
        "metadata": metadata,
        "broken": version.broken,
    }
