"""Selects the device of training and the dtype of its matrix products."""

from __future__ import annotations

import torch


def training_device(rank: int = 0) -> torch.device:
    """Return a GPU if there is one, spreading ranks over the GPUs, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device multiplies it faster than float32, else float32.

    Sums, softmax and weights stay in float32 either way.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # Without such instructions bfloat16 is emulated, at a fraction of float32's speed.
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return a context that takes matrix products in `dtype`; no-op for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
