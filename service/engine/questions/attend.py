"""The bare operator over any memory: a client's vectors, a user's history, the catalogue."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.kv_memory import KeyValueMemory
from models.attention.memory_query import MemoryQuery
from models.attention.multihead import split_heads
from models.attention.scorers import Scorer, additive, cosine, scaled_dot
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import DEFAULT_K, AttentionOptions
from models.history.user_memory import UserMemory, target_queries
from models.index.two_stage import attend_retrieved, index_heads
from service.domain.errors import Invalid
from service.domain.queries import AttendQuery, AttendResult, ScorerName, VectorMemory

Vector = NDArray[np.float32]

_SCORERS: dict[ScorerName, Scorer] = {
    "scaled_dot": scaled_dot,
    "cosine": cosine,
    "additive": additive,
}


def attend_vectors(
    query: AttendQuery, memory: VectorMemory, target: Vector, exact_up_to: int
) -> AttendResult:
    """Attend over rows that the client sent, by a query vector [d].

    Beyond `exact_up_to` rows, retrieval `auto` is coarse, here as in the functions below.

    Raises:
        Invalid: where dimensions do not fit.
    """
    heads = query.heads or 1
    if target.shape[0] != memory.keys.shape[1]:
        raise Invalid(
            "/query" if query.vector is None else "/query/vector",
            f"the query has dimension {target.shape[0]}, the keys have {memory.keys.shape[1]}: "
            "they must agree",
        )
    for name, width in (("keys", memory.keys.shape[1]), ("values", memory.values.shape[1])):
        if width % heads:
            raise Invalid("/heads", f"must divide the dimension of the {name}, {width}")
    bias = None if memory.bias is None else torch.from_numpy(memory.bias)
    if memory.visible is not None:
        bias = torch.zeros(len(memory.keys)) if bias is None else bias
        bias = bias.masked_fill(~torch.from_numpy(memory.visible), -math.inf)
    rows = KeyValueMemory(_split(memory.keys, heads), _split(memory.values, heads), bias)
    return _attend(query, _split(target[None], heads), rows, exact_up_to)


def attend_user(
    query: AttendQuery,
    snapshot: Snapshot,
    user: UserMemory,
    target: Vector | int,
) -> AttendResult:
    """Attend over every row of a user's memory through the model's projections.

    The target is an item row, or a vector of the content space; the user's part is in its query.

    Raises:
        Invalid: when another number of heads than the model's is requested, or a vector is not of
            the content space.
    """
    heads = user.memory.heads
    if query.heads not in {None, heads}:
        raise Invalid("/heads", f"a user's memory has the model's own heads, {heads}")
    memory = user.memory
    if isinstance(target, int):
        vectors = target_queries(snapshot, user, torch.tensor([target]))  # (H, 1, d)
        if query.exclude_self:
            memory = replace(memory, bias=user.bias.masked_fill(user.rows == target, -math.inf))
    else:
        _check_content(snapshot, target)
        vectors = snapshot.projected(target).queries + user.query[:, None]
    return _attend(query, vectors.transpose(0, 1), memory, None, snapshot.version)


def attend_catalogue(
    query: AttendQuery, snapshot: Snapshot, target: Vector | int, exact_up_to: int
) -> AttendResult:
    """Attend over the field keys of all listed items; each key's value is its item's vector.

    The target is an item row, or a vector of the content space.

    Raises:
        Invalid: where dimensions do not fit.
    """
    catalogue = snapshot.catalogue
    seen = catalogue.keys.mask(catalogue.visible)
    if isinstance(target, int):
        vector = catalogue.content[target]
        if query.exclude_self:
            seen = seen & (catalogue.keys.owners != target)
    else:
        _check_content(snapshot, target)
        vector = target
    heads = query.heads or 1
    if catalogue.dimension % heads:
        raise Invalid("/heads", f"must divide the keys' dimension, {catalogue.dimension}")
    places = np.flatnonzero(seen)
    owners = catalogue.keys.owners[places]
    vectors = catalogue.keys.vectors
    if len(places) < len(vectors):
        vectors = vectors[places]
    memory = KeyValueMemory(_split(vectors, heads), _split(catalogue.content[owners], heads))
    found = _attend(query, _split(vector[None], heads), memory, exact_up_to, snapshot.version)
    ids = tuple(catalogue.vocabulary.id(int(owners[row])) for row in found.rows)
    return replace(found, ids=ids)


def _attend(
    query: AttendQuery,
    vector: Tensor,
    memory: KeyValueMemory,
    exact_up_to: int | None,
    version: str | None = None,
) -> AttendResult:
    """Attend by a vector [1, H, d]; always over every row where `exact_up_to` is None."""
    count = len(memory)
    score = _SCORERS[query.scorer]
    coarse = False
    if exact_up_to is not None:
        options = AttentionOptions(mode=query.retrieval.mode, exact_up_to=exact_up_to)
        coarse = options.resolve_mode(count) == "coarse"
    with torch.inference_mode():
        if coarse and count:
            weights, rows, context, mass = attend_retrieved(
                vector,
                memory,
                index_heads(memory, "flat", score=score),
                min(query.retrieval.k or DEFAULT_K, count),
                score=score,
                temperature=query.temperature,
                hard=query.hard,
                probes=query.retrieval.probes,
            )
            # Each head has rows of its own: its weights are laid over all rows.
            dense = weights.new_zeros(1, memory.heads, count + 1)
            weights = dense.scatter_(2, torch.where(rows < 0, count, rows), weights)[..., :count]
        else:
            lookup = MemoryQuery(vector, memory, score)
            weights, context = lookup.attend(temperature=query.temperature, hard=query.hard)
            mass = torch.ones(1, memory.heads)
        weights = weights[0]  # (H, n)
        mean = weights.mean(0)
        order = torch.argsort(mean, descending=True, stable=True)
        top = order[mean[order] > 0][: query.limit]
    return AttendResult(
        tuple(top.tolist()),
        None,
        tuple(tuple(row) for row in weights[:, top].tolist()),
        # Heads lie side by side in one context, as in multi-head attention before W_O.
        tuple(context.flatten().tolist()),
        tuple(mass[0].tolist()),
        "coarse" if coarse else "exact",
        version,
    )


def _split(vectors: Vector, heads: int) -> Tensor:
    """[n, H·d] -> [n, H, d]."""
    return split_heads(torch.from_numpy(np.ascontiguousarray(vectors)), heads).transpose(0, 1)


def _check_content(snapshot: Snapshot, vector: Vector) -> None:
    dimension = snapshot.catalogue.dimension
    if vector.shape[0] != dimension:
        raise Invalid(
            "/query/vector", f"has {vector.shape[0]} dimensions; this memory's queries {dimension}"
        )
