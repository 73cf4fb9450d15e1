"""The order of things inside one layer: store, attend, score, select, keep.

This room sees tensors and cache layers. Which dense attention runs comes in from outside as a `DenseAttention`.
"""
