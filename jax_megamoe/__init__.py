"""Fused mixture-of-experts layers for JAX on NVIDIA Hopper."""
