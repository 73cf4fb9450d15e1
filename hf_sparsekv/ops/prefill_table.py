"""What each prefill backend can do, as data: one row each, in the order in which they are tried."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_sparsekv.ops import prefill_backends as backends
from hf_sparsekv.ops import prefill_probes as probes
from hf_sparsekv.ops.prefill_backends import Call, LseForm, Packed, natural_lse, one_by_one

Status = Literal["run on H200 (2026-11-30)", "run on CPU", "not run"]
"""Where its results were compared with the definition's by the tests."""

HALF = (torch.bfloat16, torch.float16)
HOPPER = range(9, 10)
AMPERE_OR_LATER = range(8, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The facts about one call that decide who can take it; nothing of them is read from a GPU."""

    device: str
    """Type of the device: "cpu", "cuda", ..."""
    compute_capability: int | None
    """Major number of the GPU's; None elsewhere."""
    dtype: torch.dtype | None
    """None when queries, keys and values differ."""
    head_dim: int
    is_causal: bool
    is_whole: bool
    """Every request has as many query rows as keys: nothing was stored before."""
    has_mask: bool
    is_empty: bool
    """There are no rows or no keys at all."""
    is_single: bool = True
    """There is one request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One row of the table."""

    name: str
    title: str
    package: str
    """What to install, with the versions that are known."""
    device: str | None
    """Type of device it runs on; None: any."""
    compute_capabilities: range | None
    """Major numbers of the GPUs it was built for; None: does not matter."""
    missing: Callable[[], str | None]
    """Why it cannot be had on this machine, or None."""
    dtypes: tuple[torch.dtype, ...] | None
    """None: any."""
    head_dims: Sequence[int] | None
    """None: any."""
    is_varlen: bool
    """Takes packed requests in one call; otherwise one call for each."""
    allows_past: bool
    """Takes fewer rows than keys, the causal mask aligned bottom-right."""
    allows_non_causal: bool
    is_definition: bool
    """Takes everything, masks and empty tensors included."""
    lse: LseForm | None
    """None: it hides the LSE, or gives one that is too rough; scorers compute what they need of it themselves."""
    status: Status
    call: Call
    is_on_request: bool = False
    """Takes a call only where it is named."""

    @property
    def dtypes_text(self) -> str:
        """As in "bf16, fp16"."""
        return "any" if self.dtypes is None else dtype_names(self.dtypes)

    @property
    def dims_text(self) -> str:
        """As in "8-256 by 8", or one by one."""
        dims = self.head_dims
        if isinstance(dims, range):
            return f"{dims[0]}-{dims[-1]} by {dims.step}"
        return "any" if dims is None else ", ".join(str(dim) for dim in dims)

    @property
    def lse_text(self) -> str:
        """How it gives the LSE: hidden or natural."""
        return "hidden" if self.lse is None else "natural"

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot take this problem here, or None."""
        if self.is_definition:
            return None
        if self.device is not None and problem.device != self.device:
            return f"runs on {self.device}, the tensors are on {problem.device}"
        capabilities, capability = self.compute_capabilities, problem.compute_capability
        if capabilities is not None and capability not in capabilities:
            return f"is built for compute capability {_span(capabilities)}, this GPU has {capability}.x"
        return self._unfit(problem) or self.missing()  # last, since it may import a package

    def waits(self, problem: Problem) -> bool:
        """Whether the host would have to wait for the GPU, to cut requests apart that the backend takes singly."""
        return problem.device == "cuda" and not (self.is_varlen or problem.is_single)

    def run(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Output [T, H, D] and LSE fp32 [H, T], natural logarithm, NaN if hidden; for problems it does not refuse."""
        with torch.no_grad():  # our ops have no gradient; flash-attn would record one whenever a weight asks for it
            if not self.is_varlen:
                return one_by_one(self.call, self.lse, packed)
            output, lse = self.call(packed)
            assert self.lse is not None and lse is not None, "only what is called one by one may hide its LSE"
            num_rows, num_heads = packed.q.shape[:2]
            has_empty_rows = packed.may_have_empty_rows
            return output, natural_lse(lse, self.lse, num_heads, num_rows, has_empty_rows=has_empty_rows)

    def _unfit(self, problem: Problem) -> str | None:
        """Which fact about the problem it has no code for."""
        if problem.has_mask:
            return "takes no mask"
        if problem.is_empty:
            return "needs at least one row and one key"
        if self.dtypes is not None and problem.dtype not in self.dtypes:
            return f"takes {dtype_names(self.dtypes)}, not {problem.dtype or 'mixed dtypes'}"
        if self.head_dims is not None and problem.head_dim not in self.head_dims:
            dims = self.dims_text.replace("-", " to ").replace(" by ", " in steps of ")
            return f"takes head dimensions {dims}, not {problem.head_dim}"
        if not (self.allows_past or problem.is_whole):
            return "takes whole prompts only"
        if not (self.allows_non_causal or problem.is_causal):
            return "takes causal attention only"
        return None


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Short names, as in bf16, fp16."""
    return ", ".join(f"{'bf' if dtype is torch.bfloat16 else 'fp'}{8 * dtype.itemsize}" for dtype in dtypes)


def _span(capabilities: range) -> str:
    return f"{capabilities[0]}.x" if len(capabilities) == 1 else f"{capabilities[0]}.0 or later"


BACKENDS = (
    Backend(
        name="flash_attn_3",
        title="FlashAttention-3 (module flash_attn_interface)",
        package="flash_attn_interface (FlashAttention-3)",
        device="cuda",
        compute_capabilities=HOPPER,
        missing=probes.flash_attn_3_missing,
        dtypes=HALF,
        head_dims=range(8, 257, 8),
        is_varlen=True,
        allows_past=True,
        allows_non_causal=True,
        is_definition=False,
        lse=LseForm(layout="HT"),
        status="not run",
        call=backends.flash_attn_3,
    ),
    Backend(
        name="cudnn",
        title="cuDNN through torch, lengths bucketed",
        package="torch",
        device="cuda",
        compute_capabilities=HOPPER,
        missing=probes.cudnn_missing,
        dtypes=HALF,
        head_dims=range(8, 129, 8),
        is_varlen=False,
        allows_past=False,
        allows_non_causal=False,
        is_definition=False,
        lse=LseForm(layout="1HT1"),
        status="run on H200 (2026-11-30)",
        call=backends.cudnn,
    ),
    Backend(
        name="flash_attn_2",
        title="FlashAttention-2 (package flash-attn)",
        package="flash-attn>=2.8",
        device="cuda",
        compute_capabilities=AMPERE_OR_LATER,
        missing=probes.flash_attn_2_missing,
        dtypes=HALF,
        head_dims=range(8, 257, 8),
        is_varlen=True,
        allows_past=True,
        allows_non_causal=True,
        is_definition=False,
        lse=LseForm(layout="HT", empty=float("inf")),
        status="run on H200 (2026-11-30)",
        call=backends.flash_attn_2,
    ),
    Backend(
        name="torch_flash",
        title="torch's own FlashAttention-2",
        package="torch",
        device="cuda",
        compute_capabilities=AMPERE_OR_LATER,
        missing=probes.torch_flash_missing,
        dtypes=HALF,
        head_dims=range(8, 257, 8),
        is_varlen=True,
        allows_past=True,
        allows_non_causal=True,
        is_definition=False,
        lse=LseForm(layout="HT", empty=float("inf")),
        status="run on H200 (2026-11-30)",
        call=backends.torch_flash,
    ),
    Backend(
        name="flashinfer",
        title="FlashInfer, compiled when first called",
        package="flashinfer-python>=0.6,<0.8",
        device="cuda",
        compute_capabilities=AMPERE_OR_LATER,
        missing=probes.flashinfer_missing,
        dtypes=HALF,
        head_dims=(64, 128, 256),
        is_varlen=False,
        allows_past=True,
        allows_non_causal=True,
        is_definition=False,
        lse=None,
        status="run on H200 (2026-11-30)",
        call=backends.flashinfer,
        is_on_request=True,
    ),
    Backend(
        name="torch_cpu",
        title="torch's flash attention for the CPU",
        package="torch",
        device="cpu",
        compute_capabilities=None,
        missing=probes.torch_cpu_missing,
        dtypes=(torch.float32, *HALF),
        head_dims=range(32, 257, 8),
        is_varlen=False,
        allows_past=True,
        allows_non_causal=True,
        is_definition=False,
        lse=LseForm(layout="1HT"),
        status="run on CPU",
        call=backends.torch_cpu,
    ),
    Backend(
        name="sdpa",
        title="torch's scaled_dot_product_attention",
        package="torch",
        device=None,
        compute_capabilities=None,
        missing=probes.nothing_missing,
        dtypes=None,
        head_dims=None,
        is_varlen=False,
        allows_past=True,
        allows_non_causal=True,
        is_definition=False,
        lse=None,
        status="run on CPU",
        call=backends.sdpa,
        is_on_request=True,
    ),
    Backend(
        name="eager",
        title="matrix products and a softmax",
        package="torch",
        device=None,
        compute_capabilities=None,
        missing=probes.nothing_missing,
        dtypes=None,
        head_dims=None,
        is_varlen=False,
        allows_past=True,
        allows_non_causal=True,
        is_definition=False,
        lse=None,
        status="run on CPU",
        call=backends.eager,
        is_on_request=True,
    ),
    Backend(
        name="reference",
        title="the PyTorch definition",
        package="torch",
        device=None,
        compute_capabilities=None,
        missing=probes.nothing_missing,
        dtypes=None,
        head_dims=None,
        is_varlen=True,
        allows_past=True,
        allows_non_causal=True,
        is_definition=True,
        lse=LseForm(layout="HT"),
        status="run on H200 (2026-11-30)",
        call=backends.definition,
    ),
)
"""The first that neither refuses a problem nor makes the host wait nor has to be named takes it."""
