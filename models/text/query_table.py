"""Encoder of queries by a table, one row for each token of a transformer's tokenizer, and its fit.

The fit is to the transformer's vectors of a catalogue's own titles and sentences.
A query of n tokens is encoded as the direction of the sum of their rows. The rows E minimise

    Σ_texts ‖ n^-½ Σ_tokens E[token] - T(text) ‖² + λ Σ_tokens ‖ E[token] - s T(token) ‖²

where T is the transformer. This is a ridge regression whose prior is the transformer's vector of
each token alone, so that a token that no text has still means something. It is convex: conjugate
gradients find the one solution in seconds, without epochs or learning rates to choose, and λ is
chosen on texts that are held out. Encoding the texts takes nearly all of the time.

With the factor n^-½, sums of rows that have little in common have about the length of a unit
vector, whether a text is short or long; the direction of a query does not depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.text.encoders import TextEncoder, Vectors


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

    It stands in for the transformer that encodes the documents, in the same space, though word
    order does not count. `name` is made of the encoder's name and of the rows [V, D], which are
    kept in half precision: parameters of search fitted with one table are not used with another.

    Raises ValueError if the rows are not finite, or not one for each token of the vocabulary.
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


MAX_TEXTS = 30_000  # that are encoded: a sample of larger catalogues
MAX_TOKENS = 100_000  # in the vocabulary: each is encoded too
_RIDGES = (0.1, 0.3, 1.0, 3.0)  # λ that are compared
_PRIOR = 0.6  # s: rows are shorter than the vectors of tokens alone, which have much in common
_HELD_OUT = 0.1  # share of the texts that λ is chosen on
_MAX_HELD_OUT = 1_000
_ITERATIONS = 20  # of conjugate gradients, after which the residual is below .002
_CHUNK = 256  # texts between two calls of progress

FitProgress = Callable[[str, int, int], None]
"""Called with a stage, its steps done and their total."""


class FittedTable(NamedTuple):
    table: QueryTable
    agreement: float  # mean cosine with the transformer's vectors of texts it was not fitted to
    texts: int  # that were encoded


def fit_query_table(
    encoder: TokenizingEncoder,
    texts: Sequence[str],
    *,
    seed: int = 0,
    progress: FitProgress | None = None,
) -> FittedTable:
    """Fit a table to texts, at most `MAX_TEXTS` of them; `seed` draws the samples.

    Raises ValueError if the vocabulary is too large, or fewer than two texts have tokens.
    """
    size = len(encoder.vocabulary)
    if size > MAX_TOKENS:
        raise ValueError(f"{encoder.name} has {size:,} tokens: a table has {MAX_TOKENS:,} at most")
    rng = np.random.default_rng(seed)
    tokens = encoder.tokenize(texts)
    spoken = np.array([at for at, ids in enumerate(tokens) if ids], dtype=np.int64)
    drawn = rng.permutation(spoken)[:MAX_TEXTS].tolist()
    if len(drawn) < 2:
        raise ValueError(f"{len(drawn)} texts are too few to fit a table to")
    targets = _encode(encoder, [texts[at] for at in drawn], "encoding sentences", progress)
    prior = _PRIOR * _encode(encoder, encoder.vocabulary, "encoding tokens", progress)
    chosen = [tokens[at] for at in drawn]
    count = max(1, min(_MAX_HELD_OUT, int(_HELD_OUT * len(chosen))))
    agreements = []
    for step, ridge in enumerate(_RIDGES):
        rows = fit_rows(chosen[count:], targets[count:], prior, ridge)
        found = QueryTable(encoder, rows).encode([texts[at] for at in drawn[:count]])
        agreements.append(float((found * targets[:count]).sum(axis=1).mean()))
        if progress is not None:
            progress("fitting the query table", step + 1, len(_RIDGES) + 1)
    best = int(np.argmax(agreements))
    table = QueryTable(encoder, fit_rows(chosen, targets, prior, _RIDGES[best]))
    if progress is not None:
        progress("fitting the query table", len(_RIDGES) + 1, len(_RIDGES) + 1)
    return FittedTable(table, agreements[best], len(drawn))


@torch.inference_mode()
def fit_rows(
    tokens: Sequence[Sequence[int]],
    targets: NDArray[np.float32],
    prior: NDArray[np.float32],
    ridge: float,
    *,
    iterations: int = _ITERATIONS,
) -> NDArray[np.float32]:
    """Solve the ridge regression of the module's docstring for λ = ridge > 0, [V, D].

    Targets are [n, D] of n texts, none without tokens; the prior is [V, D], and stays for tokens of
    no text.
    """
    lengths = np.array([len(ids) for ids in tokens])
    used, columns = np.unique(np.concatenate([*map(np.asarray, tokens)]), return_inverse=True)
    places = np.stack([np.repeat(np.arange(len(tokens)), lengths), columns])
    weights = np.repeat(lengths**-0.5, lengths).astype(np.float32)
    design = torch.sparse_coo_tensor(  # [n, U]: how often a text has each used token, over √n
        torch.from_numpy(places),
        torch.from_numpy(weights),
        (len(tokens), len(used)),
        check_invariants=False,  # torch warns if nothing is said
    ).coalesce()
    diagonal = torch.zeros(len(used)).index_add_(0, design.indices()[1], design.values() ** 2)
    start = torch.from_numpy(prior[used])
    transposed = design.t().coalesce()

    def normal(x: Tensor) -> Tensor:  # [U, D] -> [U, D]
        return transposed @ (design @ x) + ridge * x

    residual = transposed @ (torch.from_numpy(targets) - design @ start)
    change = _conjugate_gradients(normal, residual, (diagonal + ridge)[:, None], iterations)
    rows = prior.copy()
    rows[used] = (start + change).numpy()
    return rows


def _conjugate_gradients(
    matrix: Callable[[Tensor], Tensor], right: Tensor, diagonal: Tensor, iterations: int
) -> Tensor:
    """Solve matrix(x) = right [U, D] for each column, from 0, preconditioned by a diagonal [U, 1].

    Saad, Iterative Methods for Sparse Linear Systems, algorithm 9.1.
    """
    tiny = torch.finfo(right.dtype).tiny  # columns that are solved already stay as they are
    x, residual = torch.zeros_like(right), right.clone()
    scaled = residual / diagonal
    direction, energy = scaled.clone(), (residual * scaled).sum(0)
    for _ in range(iterations):
        image = matrix(direction)
        step = energy / (direction * image).sum(0).clamp_min(tiny)
        x += step * direction
        residual -= step * image
        scaled = residual / diagonal
        before, energy = energy, (residual * scaled).sum(0)
        direction = scaled + energy / before.clamp_min(tiny) * direction
    return x


def _encode(
    encoder: TokenizingEncoder, texts: Sequence[str], stage: str, progress: FitProgress | None
) -> NDArray[np.float32]:
    """Return unit vectors [n, D] of texts, those of similar length together."""
    out = np.zeros((len(texts), encoder.dimension), dtype=np.float32)
    order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
    for start in range(0, len(order), _CHUNK):
        chunk = order[start : start + _CHUNK]
        out[chunk] = encoder.encode([texts[at] for at in chunk])
        if progress is not None:
            progress(stage, start + len(chunk), len(order))
    return out
