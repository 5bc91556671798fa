"""Fused mixture-of-experts layers for JAX on NVIDIA Hopper."""

__version__ = "0.1.0"
