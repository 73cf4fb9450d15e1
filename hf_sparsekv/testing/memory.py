"""How large the tensors are that a piece of code makes, the insides of our own ops included."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_sparsekv.ops import reference
from hf_sparsekv.ops.library import NAMESPACE
from hf_sparsekv.ops.prefill import PREFILL


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that any operation under it returned, on the CPU."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """Nothing seen yet; with a dtype, tensors of others do not count."""
        super().__init__()
        self.num_bytes, self._dtype = 0, dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it returns."""
        if func.namespace == NAMESPACE:  # one operation to PyTorch, and its own tensors would go unseen
            with self:
                return _definition(func)(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and self._dtype in (None, tensor.dtype):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


def _definition(func: Any) -> Callable[..., Any]:
    """What runs on the CPU behind one of our ops."""
    name: str = func.overloadpacket.__name__
    return PREFILL.get(name) or getattr(reference, name)
