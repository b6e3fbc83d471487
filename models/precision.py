"""The dtype of training's matrix products."""

from __future__ import annotations

import torch


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it faster than float32, else float32.

    Sums, softmax and weights stay in float32 either way.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # Without such instructions bfloat16 is emulated, at a fraction of float32's speed.
    able = torch.cpu.get_capabilities()
    fast = able.get("avx512_bf16") or able.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32
