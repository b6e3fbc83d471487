"""Parts of a store that several machines share, beside the records."""

from __future__ import annotations

from typing import Protocol

from service.stores.protocols.shared_files import SharedFiles


class SharedParts(Protocol):
    """What the machines that serve one namespace share beside its records."""

    def files(self, kind: str) -> SharedFiles:
        """Return the sets of files of a kind: a word of lower-case letters."""
        ...
