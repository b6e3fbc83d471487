"""Why a target scored as it did: contributions that add up.

After the softmax everything is linear. With α the weights, v the values, and o what a value must
point at to raise the score, the attention part of a score is Σ_h Σ_j α^h_j ⟨v^h_j, o^h⟩: row j
contributes Σ_h α^h_j g^h_j with the gain g^h_j = ⟨v^h_j, o^h⟩. Contributions are signed and exact.
A large weight on a value that does not matter explains nothing.
"""

from __future__ import annotations

from torch import Tensor


def gains(values: Tensor, outputs: Tensor) -> Tensor:
    """What each row would add to the score at weight 1: ⟨v^h_j, o^h⟩.

    values [..., H, n, V], outputs [..., H, V] -> [..., H, n].
    """
    return (values @ outputs[..., None])[..., 0]


def contributions(weights: Tensor, gains: Tensor) -> Tensor:
    """What each row did add, summed over heads: [..., H, n] and [..., H, n] -> [..., n].

    Signed; they sum to the attention part of the score.
    """
    return (weights * gains).sum(-2)
