"""The tokens that several continuations of one context feed to a model, each common beginning once.

Shapes: T token of the tree, in an order in which every token comes after the one before it in its text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROOT = -1
"""Stands for the context: what comes before the first token."""


@dataclass
class TokenTree:
    """What is fed: the tail, which all continuations share, then all but the last token of each continuation."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Index of the token before each one, or `ROOT`."""
    depths: list[int] = field(default_factory=list)
    """Tokens before each one, the context's not counted."""
    paths: list[list[int]] = field(default_factory=list)
    """For each token of each continuation, the index of the token whose logits predict it, or `ROOT`."""

    @classmethod
    def build(cls, tail: Sequence[int], continuations: Sequence[Sequence[int]]) -> "TokenTree":
        """The smallest tree for some continuations, each of at least one token."""
        tree, known = cls(), {}
        for continuation in continuations:
            place, path = ROOT, [ROOT]
            for token in (*tail, *continuation[:-1]):
                key = (place, token)
                if key not in known:
                    known[key] = len(tree.tokens)
                    tree.tokens.append(token)
                    tree.parents.append(place)
                    tree.depths.append(0 if place == ROOT else tree.depths[place] + 1)
                place = known[key]
                path.append(place)
            tree.paths.append(path[len(tail) :])
        return tree

    @property
    def predicting(self) -> list[int]:
        """Indices of the tokens whose logits are wanted, ascending; `ROOT` is no token."""
        return sorted({place for path in self.paths for place in path} - {ROOT})

    def visible(self, device: torch.device) -> Tensor:
        """bool [T, T]: entry (i, j) says whether token i sees token j, which is itself or stands before it."""
        seen = torch.eye(len(self.tokens), dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            if parent != ROOT:
                seen[i] |= seen[parent]
        return seen.to(device)
