"""The engine: many requests share one model, one block pool, and one forward pass per step.

Read in a request's order: `request`, `scheduler`, `tables`, `block_pool`. These four decide everything on the host and
know no tensors.
"""
