"""Launches every kernel on small problems and compares with the definitions: a program for compute-sanitizer.

    python kernels/tests/sanitize.py                                 every group, without a tool
    python kernels/tests/sanitize.py --list                          the groups
    compute-sanitizer --tool racecheck python kernels/tests/sanitize.py --only score
    python kernels/tests/sanitize.py --device cpu                    definitions on both sides: checks this program

Tools patch and follow every kernel, torch's too. So nothing is computed by torch on the GPU: inputs are copied there,
the op is launched once, and what it wrote is copied back and compared on the CPU. Outputs and workspaces are left as
they were allocated, so that initcheck sees what a kernel does not write. Run with PYTORCH_NO_CUDA_MEMORY_CACHING=1:
each tensor then is an allocation of its own size, and a step past its end is seen.
"""

import argparse
import sys
import time
from typing import Any

import conftest  # noqa: F401 (finds hf_sparsekv where it is not installed)
import definitions
import torch
from decode_cases import COUNTER_BYTES, same_dtype_attention
from helpers import load_ops
from sanitize_cases import GROUPS, Launch
from torch import Tensor

from hf_sparsekv.ops.reference.pool import dense_rows
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_close_fp32, assert_close_policy

EXACT = ("k_pool", "v_pool", "k_out", "v_out")
"""Copied, never computed."""


def find_ops(device: str) -> Any:
    """The compiled ops, of the library that the environment names or built for this GPU; on the CPU definitions."""
    return definitions if device == "cpu" else load_ops()


def run(ops: Any, launch: Launch, device: str) -> None:
    """One launch, and an AssertionError where it is not what the definition gives."""
    given = launch.arguments
    placed = {name: place(value, device, name in launch.fresh) for name, value in given.items()}
    workspace = None
    if launch.splits is not None:
        placed["workspace"] = workspace = decode_workspace(ops, launch, device)
    getattr(ops, launch.op)(**placed)
    results = [name for name in (*launch.fresh, *launch.changed) if name != "workspace" and placed[name] is not None]
    actual = {name: placed[name].cpu() for name in results}  # of a workspace, kernels write what they need
    if workspace is not None:
        assert not workspace[:COUNTER_BYTES].cpu().any(), "counters of the workspace are not zero"
    expected = defined(launch)
    for name, values in actual.items():
        try:
            compare(name, values, expected)
        except AssertionError as error:
            raise AssertionError(f"`{name}`: {error}") from error


def place(value: Any, device: str, is_fresh: bool) -> Any:
    """A copy of its own on the device, without gaps."""
    if not isinstance(value, Tensor):
        return value
    if is_fresh:
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    return value.contiguous().clone() if device == "cpu" else value.contiguous().to(device)


def decode_workspace(ops: Any, launch: Launch, device: str) -> Tensor | None:
    """As long as the launch needs, zeros in the counters and nothing elsewhere; none for one split of attention."""
    given, is_step = launch.arguments, launch.op == "decode_step"
    if launch.splits == 1 and not is_step:
        return None
    q, kv_heads = given["q"], given["k_pool"].shape[1]
    num_rows = 1 if is_step else q.shape[1]
    capacity = given["scores"].shape[2] if is_step else given["max_length"]
    sizes = q.shape[0], kv_heads, q.shape[-2] // kv_heads, num_rows, q.shape[-1], capacity
    num_bytes = ops.decode_workspace_bytes(*sizes, is_step, launch.splits)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    workspace[:COUNTER_BYTES].copy_(torch.zeros(COUNTER_BYTES, dtype=torch.uint8))
    return workspace


def defined(launch: Launch) -> dict[str, Any]:
    """The arguments as the definition leaves them, output in fp32."""
    given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in launch.arguments.items()}
    if launch.splits is not None:
        given |= {"workspace": None, "q": given["q"].float(), "out": given["out"].float()}
    getattr(definitions, launch.op)(**given)
    return given


def compare(name: str, actual: Tensor, expected: dict[str, Any]) -> None:
    """By the policy for what a kernel computes in fp32, sums for an output, or copies."""
    reference: Tensor = expected[name]
    if name == "out":
        assert_close_policy(actual, reference, plain_output(actual, expected))
    elif name in EXACT:
        is_nan = reference.isnan()  # the definition on a CPU may give NaN other bits
        assert_bitwise_equal(actual.isnan(), is_nan)
        assert_bitwise_equal(actual.masked_fill(is_nan, 0.0), reference.masked_fill(is_nan, 0.0))
    elif not actual.is_floating_point():
        assert_bitwise_equal(actual, reference)
    else:
        assert_close_fp32(actual, reference)


def plain_output(out: Tensor, given: dict[str, Any]) -> Tensor:
    """What PyTorch makes of the same inputs in the dtype of `out`."""
    q = given["q"].to(out.dtype)
    q_BTHD = q if q.dim() == 4 else q[:, None]
    capacity = given.get("max_length") or given["scores"].shape[2]
    keys, values = (dense_rows(given[name], given["block_table"], capacity) for name in ("k_pool", "v_pool"))
    rows = []
    for b, length in enumerate(given["lengths"].tolist()):
        rows.append(same_dtype_attention(q_BTHD[b], keys[b, :, :length], values[b, :, :length], given["scale"]))
    return torch.stack(rows).view(out.shape)


def main() -> int:
    """Command line, see this module's docstring; 1 when a launch was not what its definition gives."""
    parser = argparse.ArgumentParser(description="Launch every kernel on small problems.")
    parser.add_argument("--only", default=",".join(GROUPS), help="comma-separated groups, default all")
    parser.add_argument("--list", action="store_true", help="name the groups and end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.list:
        print("\n".join(GROUPS))
        return 0
    names = options.only.split(",")
    if unknown := [name for name in names if name not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    ops, num_wrong = find_ops(options.device), 0
    for name in names:
        torch.manual_seed(0)
        start, num_launches = time.monotonic(), 0
        for launch in GROUPS[name]():
            num_launches += 1
            try:
                run(ops, launch, options.device)
            except AssertionError as error:
                num_wrong += 1
                print(f"wrong: {launch.op}, {launch.what}: {error}", flush=True)
        print(f"{name}: {num_launches} launches, {time.monotonic() - start:.1f} s", flush=True)
    print("all as defined" if not num_wrong else f"{num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
