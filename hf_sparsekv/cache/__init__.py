"""Where keys and values live. This room knows layers, columns and slots, not prompts, scores' meaning or models.

`columns`: every token of the history in order, padding included. `slots`: a fixed number of places per request and KV
head, in any order of positions. `padding`: which columns hold tokens. `layer`: what one layer of a cache consists of.
"""
