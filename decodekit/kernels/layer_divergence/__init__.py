"""How far each early layer's distribution is from the final one."""

from decodekit.kernels.layer_divergence.reference import Divergence, layer_divergence

__all__ = ["Divergence", "layer_divergence"]
