"""NumPy version of `HistoryEncoder.append` for a single event.

The matrix products of one event are so small that torch's call overhead exceeds their run time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.encoder.encoder_block import EncoderBlock
from models.encoder.history_encoder import GAP_SCALE, EncoderCache, HistoryEncoder
from models.encoder.recency_bias import AGE_BUCKETS, age_bucket_edges, position_bucket

Array = NDArray[np.float32]


class _Norm(NamedTuple):
    """A LayerNorm's parameters."""

    weight: Array
    bias: Array
    eps: float

    def __call__(self, x: Array) -> Array:
        centred = x - np.add.reduce(x) / len(x)  # `mean` has four times the overhead
        normed = centred * (1 / np.sqrt(centred @ centred / len(x) + self.eps))
        scaled: Array = normed * self.weight + self.bias
        return scaled


class _Block(NamedTuple):
    """An encoder block's parameters: W [out, in], b [out]."""

    norm: _Norm
    key_value: Array
    query_gate: tuple[Array, Array]
    out: Array
    norm_feed: _Norm
    feed: tuple[Array, Array]
    down: Array
    table: Array  # [H, buckets]


class NumpyEncoder:
    """Appends single events to an encoder cache; holds a copy of the trained weights."""

    def __init__(self, encoder: HistoryEncoder) -> None:
        """Copy the weights."""
        self._norm_in = _norm(encoder.norm_in)
        self._gap = GAP_SCALE * _array(encoder.gap.weight)
        self._edges = age_bucket_edges().numpy()
        self._blocks = [_block(each) for each in encoder.blocks if isinstance(each, EncoderBlock)]

    def append(self, cache: EncoderCache, event: Tensor, timestamp: int) -> EncoderCache:
        """Return the cache with one more event.

        Args:
            cache: of the events before.
            event: the input vector [dim].
            timestamp: microseconds.
        """
        blocks, heads, old, size = cache.keys.shape
        shape = (blocks, heads, old + 1, size)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        keys[:, :, :old], values[:, :, :old] = cache.keys.numpy(), cache.values.numpy()
        times = np.empty(old + 1, np.int64)
        times[:old], times[old] = cache.timestamps.numpy(), timestamp
        ages = np.searchsorted(self._edges, timestamp - times, side="right")  # [old + 1]
        bucket = _positions(old + 1) + ages
        x: Array = self._norm_in(event.numpy() + self._gap[ages[old - 1] if old else 0])
        for number, block in enumerate(self._blocks):
            normed = block.norm(x)
            own = (block.key_value @ normed).reshape(2, heads, size)
            keys[number, :, old], values[number, :, old] = own
            if number < blocks - 1:
                context = _attention_output(block, normed, keys[number], values[number], bucket)
                x = _feed_forward(block, x + context)
        return EncoderCache(
            torch.from_numpy(keys), torch.from_numpy(values), torch.from_numpy(times),
            torch.from_numpy(x),
        )  # fmt: skip


def _attention_output(
    block: _Block, normed: Array, keys: Array, values: Array, bucket: NDArray[np.int64]
) -> Array:
    """Return the gated output of the attention, [dim]."""
    weight, bias = block.query_gate
    both = weight @ normed + bias
    heads, _, size = keys.shape
    query, gate = both[: heads * size].reshape(heads, size), both[heads * size :]
    context = attend_one(query, keys, values, block.table.take(bucket, 1)).reshape(-1)
    added: Array = _sigmoid(gate) * (block.out @ context)
    return added


def attend_one(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Attend from one query [H, d] over keys and values [H, n, d] with bias [H, n]: [H, d]."""
    scores: Array = (keys @ query[:, :, None])[:, :, 0] * query.shape[1] ** -0.5 + bias
    scores -= np.maximum.reduce(scores, 1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, 1, keepdims=True)
    context: Array = (scores[:, None] @ values)[:, 0]
    return context


def _feed_forward(block: _Block, x: Array) -> Array:
    """Return the residual stream after the gated SwiGLU."""
    weight, bias = block.feed
    projected = weight @ block.norm_feed(x) + bias
    hidden = block.down.shape[1]
    left, right = projected[:hidden], projected[hidden : 2 * hidden]
    gate = projected[2 * hidden :]
    updated: Array = x + _sigmoid(gate) * (block.down @ (left * _sigmoid(left) * right))
    return updated


def _sigmoid(x: Array) -> Array:
    y: Array = 0.5 * np.tanh(0.5 * x) + 0.5  # does not overflow
    return y


_POSITIONS = (position_bucket(torch.arange(4_096)) * AGE_BUCKETS).flip(0).numpy()


def _positions(count: int) -> NDArray[np.int64]:
    """Return the position part of the buckets of `count` events, newest last."""
    if count > len(_POSITIONS):
        distance = torch.arange(count - 1, -1, -1)
        return (position_bucket(distance) * AGE_BUCKETS).numpy()
    return _POSITIONS[len(_POSITIONS) - count :]


def _block(block: EncoderBlock) -> _Block:
    return _Block(
        _norm(block.norm_attention),
        _array(block.key_value.weight),
        _affine(block.query_gate),
        _array(block.out.weight),
        _norm(block.norm_feed),
        _affine(block.feed),
        _array(block.down.weight),
        _array(block.recency.table()),
    )


def _norm(norm: nn.LayerNorm) -> _Norm:
    return _Norm(_array(norm.weight), _array(norm.bias), norm.eps)


def _affine(layer: nn.Linear) -> tuple[Array, Array]:
    return _array(layer.weight), _array(layer.bias)


def _array(weight: Tensor) -> Array:
    array: NDArray[Any] = weight.detach().cpu().numpy().astype(np.float32)
    return array
