"""Serving measured: a closed loop of random requests, its times, and what they amount to.

`workload` drives an engine, `baseline` transformers' own continuous batching; both give a `LoopRun`, which `report`
turns into figures. `cases` runs a table of them on one model, `shapes` makes models that need no download.
"""
