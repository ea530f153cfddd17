"""Protocols, types, errors, the plugin registry, counter-based randomness and the seam to transformers."""
