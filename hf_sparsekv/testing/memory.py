"""How large the tensors are that a piece of code makes and reads, the insides of our own ops included."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_sparsekv.hf import paged
from hf_sparsekv.ops import reference
from hf_sparsekv.ops.library import NAMESPACE
from hf_sparsekv.ops.prefill import PREFILL


class _InsideOurOps(TorchDispatchMode):
    """Sees every operation under it on the CPU; in place of one of our own ops, those that it consists of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at it."""
        if func.namespace == NAMESPACE:  # one operation to PyTorch, and its own tensors would go unseen
            with self:
                return _definition(func)(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._look(func, tree_leaves((args, kwargs)), tree_leaves(result))
        return result

    def _look(self, func: Any, given: list[Any], returned: list[Any]) -> None:
        raise NotImplementedError


class LargestTensor(_InsideOurOps):
    """Bytes of the largest storage that any operation under it returned, on the CPU."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """Nothing seen yet; with a dtype, tensors of others do not count."""
        super().__init__()
        self.num_bytes, self._dtype = 0, dtype

    def _look(self, func: Any, given: list[Any], returned: list[Any]) -> None:
        for tensor in returned:
            if isinstance(tensor, Tensor) and self._dtype in (None, tensor.dtype):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())


class ElementsRead(_InsideOurOps):
    """Elements of all tensors that the operations under it were given, on the CPU; a view reads none."""

    def __init__(self) -> None:
        """Nothing read yet."""
        super().__init__()
        self.num_elements = 0

    def _look(self, func: Any, given: list[Any], returned: list[Any]) -> None:
        if not func.is_view:
            self.num_elements += sum(tensor.numel() for tensor in given if isinstance(tensor, Tensor))


def _definition(func: Any) -> Callable[..., Any]:
    """What runs on the CPU behind one of our ops."""
    name: str = func.overloadpacket.__name__
    if name == "paged_attention":
        return paged._paged_attention
    return PREFILL.get(name) or getattr(reference, name)
