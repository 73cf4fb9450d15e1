"""Utilities for tests, shipped so that anyone who adds a kernel or a scorer can use the same ones.

`compare` holds the numbers policy: every tolerance of the project, by name.
"""
