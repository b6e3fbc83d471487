"""Encoder of queries by a table: one row for each token of a transformer's own tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from models.text.static_encoder import TextEncoder, Vectors


@runtime_checkable
class TokenizingEncoder(TextEncoder, Protocol):
    """Text encoder that says into which tokens it cuts a text."""

    @property
    def vocabulary(self) -> Sequence[str]:
        """The text of each token by its id; empty for tokens that stand for no text."""
        ...

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens and without a limit."""
        ...


class QueryTable:
    """Encoder of queries as the direction of the sum of one row per token: microseconds a query.

    It stands in for a transformer, which goes on to encode the documents: its vectors are of the
    transformer's space, though word order does not count. Each catalogue has its own, fitted by
    `models.text.query_table_fit`.

    `name` is made of the encoder's name and of the rows, so that parameters of search that were
    fitted with one table are not used with another.

    Args:
        encoder: of the documents, whose tokenizer cuts the queries too.
        rows: [V, D], of each token of the encoder's vocabulary; kept in half precision.

    Raises:
        ValueError: the rows are not one for each token, of the encoder's dimension and finite.
    """

    quick = True

    def __init__(self, encoder: TokenizingEncoder, rows: NDArray[np.floating]) -> None:
        expected = len(encoder.vocabulary), encoder.dimension
        if rows.shape != expected:
            raise ValueError(f"the table is {rows.shape}, not {expected} as {encoder.name} needs")
        self.rows: NDArray[np.float16] = np.ascontiguousarray(rows, dtype=np.float16)
        if not np.isfinite(self.rows).all():
            raise ValueError("the table has numbers that are not finite")
        self.dimension = encoder.dimension
        digest = hashlib.blake2b(self.rows.tobytes(), digest_size=8).hexdigest()
        self.name = f"{encoder.name}+table-{digest}"
        self._tokenize = encoder.tokenize

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors [n, D], float32; all zero for a text without any token."""
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for at, ids in enumerate(self._tokenize(texts)):
            total = self.rows[ids].sum(axis=0, dtype=np.float32)
            out[at] = total / (np.linalg.norm(total) or 1.0)
        return out
