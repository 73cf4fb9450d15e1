"""Measurements of what a sparse cache keeps and what it costs. No part of the package: run from a checkout."""
