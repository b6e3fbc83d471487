"""Text embeddings, computed once for each text: cached in memory for queries, on disk for items.

The encoder is the one that a setting names: `static`, a package that carries a model, or a folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import metadata
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from models.catalogue.cow import CowArray
from models.compute.checkpoint import ProgressCallback
from models.text.encoders import SentenceEncoder, StaticEncoder, TextEncoder
from service.domain.errors import Invalid
from service.domain.settings import PREFIX, STATIC_ENCODER
from service.runtime.durable_files import make_directory, write


def open_encoder(setting: str) -> TextEncoder:
    """Open a text encoder. Nothing is downloaded: an encoder that is not installed is refused.

    `setting` is `static`, or the name of an installed package that carries a sentence-transformers
    model, or, with a slash in it, the folder of one. Raises `Invalid`, which says what to do.
    """
    if setting == STATIC_ENCODER:
        return StaticEncoder()
    # The model's folder is all that is loaded from; libraries that would look further, for what
    # a folder lacks, are told not to before they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return SentenceEncoder(_folder(setting))
    except ImportError as error:
        raise Invalid(
            "",
            f"{PREFIX}ENCODER is {setting}, which needs sentence-transformers ({error}): "
            "pip install 'heed[transformers]'",
        ) from None
    except ValueError as error:
        raise Invalid("", f"{PREFIX}ENCODER is {setting}: {error}") from error


def is_folder(setting: str) -> bool:
    """Report whether a setting names the folder of a model, rather than a package."""
    return os.sep in setting or setting in {".", ".."}


def _folder(setting: str) -> Path:
    """Return the model's folder. Raises ValueError without one."""
    if is_folder(setting):
        return Path(setting).expanduser().absolute()
    try:
        files = metadata.files(setting) or []
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"it is not {STATIC_ENCODER}, and no package of that name is installed: pip install "
            f"it, or write a folder with a slash, such as ./{setting}"
        ) from None
    # Found by what was installed: the package itself is not run for it.
    found = [Path(str(file.locate())).parent for file in files if file.name == "modules.json"]
    if len(found) != 1:
        raise ValueError(
            f"the package carries {len(found)} sentence-transformers models (folders with "
            "modules.json), where one is needed: write the folder of one"
        )
    return found[0]


Vectors = NDArray[np.float32]

_log = logging.getLogger(__name__)

_CHUNK = 128  # texts between two tellings; a transformer takes seconds for them


class EmbeddingCache:
    """A text encoder with a cache of its embeddings.

    The file is derived: it is rebuilt when it is missing, damaged or of another encoder, and losing
    it costs time only. It is read by the first call that needs it: a start whose catalogue comes
    from a cache needs no embedding of an item.
    """

    def __init__(self, encoder: TextEncoder, path: Path | None = None) -> None:
        self.encoder = encoder  # its name identifies the space of the vectors
        self._path = path
        self._encoding = threading.Lock()  # of the encoder, so that each text is encoded once
        self._lock = threading.Lock()  # of what is below
        self._rows: dict[bytes, int] = {}
        # As on disk, so that a restart changes no answer.
        self._vectors = CowArray(np.zeros((0, encoder.dimension), dtype=np.float16))
        self._saved = 0
        # A folder that is gone since was removed with its namespace, and is not created again.
        self._has_folder = path is not None and path.parent.is_dir()
        # Returns the unit vector [D] of a query; the latest few thousand are cached.
        self.query = lru_cache(maxsize=4_096)(self._encode_query)
        self._loading = threading.Lock()
        self._loaded = path is None

    def load(self) -> None:
        """Read the file, unless that was done. Call it before a fork, to share its embeddings."""
        with self._loading:
            if not self._loaded and self._path is not None:
                self._load(self._path)
            self._loaded = True

    def encode(self, texts: Sequence[str], progress: ProgressCallback | None = None) -> Vectors:
        """Return unit vectors [n, D] of item texts; texts encoded before are not encoded again.

        As work goes on, `progress` is called: how many new texts are encoded, of how many.
        """
        self.load()
        keys = [_digest(text) for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True)
               if key not in self._rows}  # fmt: skip
        for start in range(0, len(new), _CHUNK):
            chunk = islice(new.items(), start, start + _CHUNK)
            with self._encoding:  # not `_lock`: `known` is answered while a slow encoder works
                self._encode_missing(dict(chunk))
            if progress is not None:
                progress(min(start + _CHUNK, len(new)), len(new))
        return self._known(keys)

    def known(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors [n, D] of the texts encoded before; zero for the others."""
        self.load()
        return self._known([_digest(text) for text in texts])

    def missing(self, texts: Iterable[str]) -> set[str]:
        """Return the texts that `encode` would encode."""
        self.load()
        return {text for text in texts if _digest(text) not in self._rows}

    def _encode_query(self, text: str) -> Vectors:
        vector: Vectors = self.encoder.encode([text])[0]
        return vector

    def _encode_missing(self, chunk: dict[bytes, str]) -> None:
        """Encode the texts of a chunk, by digest, that another thread has not encoded meanwhile."""
        chunk = {key: text for key, text in chunk.items() if key not in self._rows}
        if not chunk:
            return
        vectors = self.encoder.encode([*chunk.values()]).astype(np.float16)
        with self._lock:
            first = len(self._vectors)
            self._vectors = self._vectors.extended(vectors)
            self._rows |= {key: first + at for at, key in enumerate(chunk)}

    def _known(self, keys: Sequence[bytes]) -> Vectors:
        with self._lock:
            rows = np.array([self._rows.get(key, -1) for key in keys], np.int64)
            vectors = self._vectors.array
        found = np.zeros((len(rows), self.encoder.dimension), np.float32)
        found[rows >= 0] = vectors[rows[rows >= 0]]
        return found

    def save(self) -> None:
        """Write new embeddings to disk: a new file beside the old one, then renamed over it.

        If that is not possible, the log says so, and the texts are encoded again another time.
        """
        with self._lock:
            if self._path is None or self._saved == len(self._vectors):
                return
            hashes = np.frombuffer(b"".join(self._rows), dtype=np.uint8).reshape(-1, 16)
            data = save({"hashes": hashes, "vectors": self._vectors.array})
            count = len(self._vectors)
        name = self.encoder.name.encode()
        checksum = hashlib.blake2b(data, digest_size=16).digest()
        try:
            folder = self._path.parent
            if not self._has_folder:
                make_directory(folder)
                self._has_folder = True
            with tempfile.TemporaryDirectory(prefix=".embeddings-", dir=folder) as temporary:
                new = Path(temporary, "new")
                write(new, checksum + len(name).to_bytes(2, "big") + name + data)
                new.replace(self._path)
        except OSError as error:
            _log.warning("embeddings were not saved: %s", error)
        else:
            self._saved = count

    def detach(self) -> None:
        """Write to disk no more: the folder was removed, with all that was stored there."""
        with self._lock:
            self._path = None

    def _load(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("embeddings kept from before cannot be read: %s", error)
            return
        size = int.from_bytes(content[16:18], "big")
        name, data = content[18 : 18 + size], content[18 + size :]
        if content[:16] != hashlib.blake2b(data, digest_size=16).digest():
            return
        if name != self.encoder.name.encode():
            _log.warning(
                "%s holds vectors of the text encoder %s, which are not used: the texts are "
                "encoded again by %s",
                path,
                name.decode(errors="replace"),
                self.encoder.name,
            )
            return
        try:
            parts = load(data)
        except SafetensorError:
            return
        hashes = parts["hashes"].tobytes()
        # In a file in memory from the start, which other processes may share.
        self._vectors = CowArray(parts["vectors"][:0]).extended(parts["vectors"])
        self._rows = {hashes[16 * at : 16 * at + 16]: at for at in range(len(self._vectors))}
        self._saved = len(self._vectors)


def is_intact(path: Path) -> bool:
    """Report whether a file of embeddings matches its checksum. Raises `OSError`."""
    content = path.read_bytes()
    data = content[18 + int.from_bytes(content[16:18], "big") :]
    return content[:16] == hashlib.blake2b(data, digest_size=16).digest()


def is_of_other_encoder(path: Path, encoder: str) -> bool:
    """Report whether a file holds vectors of another encoder than the one of this name."""
    try:
        with path.open("rb") as file:
            head = file.read(18)
            return file.read(int.from_bytes(head[16:], "big")) != encoder.encode()
    except OSError:
        return False


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
