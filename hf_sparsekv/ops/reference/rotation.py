"""RoPE in rotate-half layout, as Llama-family models have it: pairs (i, i + D/2) of a head."""

import torch
from torch import Tensor


def rotate(x: Tensor, angles: Tensor, *, backwards: bool = False) -> Tensor:
    """Turn every pair of a head.

    Args:
        x: fp32 [..., D].
        angles: fp32 [..., D / 2], radians; position times inverse frequency.
        backwards: undo it.
    """
    cos, sin = angles.cos(), angles.sin() * (-1.0 if backwards else 1.0)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
