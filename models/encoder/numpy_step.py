"""NumPy version of `HistoryEncoder.append` for a single event.

The matrix products of one event are so small that torch's call overhead exceeds their run time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.encoder.encoder_block import EncoderBlock
from models.encoder.history_encoder import GAP_SCALE, EncoderCache, HistoryEncoder
from models.encoder.recency_bias import AGE_BUCKETS, AGE_EDGES, POSITION_BUCKET_OF

Array = NDArray[np.float32]

# The position part of the bucket of each distance, up to the first in the last bucket.
_POSITIONS = POSITION_BUCKET_OF.numpy() * AGE_BUCKETS


class _Norm:
    """A LayerNorm."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self.weight, self.bias, self.eps = _array(norm.weight), _array(norm.bias), norm.eps

    def __call__(self, x: Array) -> Array:
        centred = x - np.add.reduce(x) / len(x)  # `mean` has four times the overhead
        normed = centred * (1 / np.sqrt(centred @ centred / len(x) + self.eps))
        scaled: Array = normed * self.weight + self.bias
        return scaled


class _Block:
    """An encoder block's parameters: W [out, in], b [out]."""

    def __init__(self, block: EncoderBlock) -> None:
        self.norm, self.norm_feed = _Norm(block.norm_attention), _Norm(block.norm_feed)
        self.key_value, self.out = _array(block.key_value.weight), _array(block.out.weight)
        self.query_gate, self.query_gate_bias = _affine(block.query_gate)
        self.feed, self.feed_bias = _affine(block.feed)
        self.down = _array(block.down.weight)
        self.table = _array(block.recency.table())  # [H, buckets]

    def attention_output(
        self, normed: Array, keys: Array, values: Array, bucket: NDArray[np.int64]
    ) -> Array:
        """Return the gated output of the attention, [dim]."""
        both = self.query_gate @ normed + self.query_gate_bias
        heads, _, size = keys.shape
        query, gate = both[: heads * size].reshape(heads, size), both[heads * size :]
        context = attend_one(query, keys, values, self.table.take(bucket, 1)).reshape(-1)
        return _sigmoid(gate) * (self.out @ context)

    def feed_forward(self, x: Array) -> Array:
        """Return the residual stream after the gated SwiGLU."""
        projected = self.feed @ self.norm_feed(x) + self.feed_bias
        hidden = self.down.shape[1]
        left, right = projected[:hidden], projected[hidden : 2 * hidden]
        gate = projected[2 * hidden :]
        return x + _sigmoid(gate) * (self.down @ (left * _sigmoid(left) * right))


class NumpyEncoder:
    """Appends single events to an encoder cache; holds a copy of the trained weights."""

    def __init__(self, encoder: HistoryEncoder) -> None:
        self._norm_in, self._norm_out = _Norm(encoder.norm_in), _Norm(encoder.norm_out)
        self._gap = GAP_SCALE * _array(encoder.gap.weight)
        self._edges = AGE_EDGES.numpy()
        self._blocks = [_Block(each) for each in encoder.blocks if isinstance(each, EncoderBlock)]

    def append(self, cache: EncoderCache, event: Tensor, timestamp: int) -> EncoderCache:
        """Return the cache with one more event: its input vector [dim], and microseconds."""
        blocks, heads, old, size = cache.keys.shape
        shape = (blocks, heads, old + 1, size)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        keys[:, :, :old], values[:, :, :old] = cache.keys.numpy(), cache.values.numpy()
        times = np.empty(old + 1, np.int64)
        times[:old], times[old] = cache.timestamps.numpy(), timestamp
        ages = np.searchsorted(self._edges, timestamp - times, side="right")  # [old + 1]
        bucket = _POSITIONS.take(np.arange(old, -1, -1), mode="clip") + ages
        x: Array = self._norm_in(event.numpy() + self._gap[ages[old - 1] if old else 0])
        for number, block in enumerate(self._blocks):
            normed = block.norm(x)
            own = (block.key_value @ normed).reshape(2, heads, size)
            keys[number, :, old], values[number, :, old] = own
            context = block.attention_output(normed, keys[number], values[number], bucket)
            x = block.feed_forward(x + context)
        states = np.empty((old + 1, len(x)), np.float32)
        states[:old], states[old] = cache.states.numpy(), self._norm_out(x)
        return EncoderCache(*map(torch.from_numpy, (keys, values, times, states)))


def attend_one(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Attend from one query [H, d] over keys and values [H, n, d] with bias [H, n]: [H, d]."""
    scores: Array = (keys @ query[:, :, None])[:, :, 0] * query.shape[1] ** -0.5 + bias
    scores -= np.maximum.reduce(scores, 1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, 1, keepdims=True)
    return (scores[:, None] @ values)[:, 0]


def _sigmoid(x: Array) -> Array:
    y: Array = 0.5 * np.tanh(0.5 * x) + 0.5  # does not overflow
    return y


def _affine(layer: nn.Linear) -> tuple[Array, Array]:
    return _array(layer.weight), _array(layer.bias)


def _array(weight: Tensor) -> Array:
    return weight.detach().cpu().numpy().astype(np.float32)
