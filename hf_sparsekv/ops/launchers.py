"""The compiled ops under the names of ours: what their checks refuse becomes an InputError that names our argument."""

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from hf_sparsekv.errors import ConfigError, InputError

COMPILED: dict[str, tuple[str, Mapping[str, str]]] = {
    "window_lse": ("lse_tail", {}),
    "window_score": ("score", {}),
    "key_anchor": ("key_anchor", {}),
    "kv_diversity": ("kv_diversity", {}),
    "select": ("select", {}),
    "compact": ("compact", {"in_table": "block_table"}),
    "compact_into": (
        "compact",
        {"k_out": "k_pool", "v_out": "v_pool", "k_pool": "k", "v_pool": "v", "out_table": "block_table"},
    ),
    "write_packed": ("write_kv_packed", {"slot_mapping": "slots"}),
    "write_slots": ("write_kv", {}),
    "attend_slots": ("decode_attention", {}),
    "decode_step": ("decode_step", {}),
}
"""Per op of ours: the compiled op, and the arguments that it calls by another name."""

_REFUSAL = re.compile(r"hf_sparsekv_kernels\.\w+: argument ([^\n]*)")


def launchers(namespace: Any, library: str) -> SimpleNamespace:
    """What `kernels` calls: per op of ours the compiled one; and `decode_workspace_bytes`.

    Args:
        namespace: `torch.ops.hf_sparsekv_kernels`, loaded.
        library: its path, for messages.
    Raises:
        ConfigError: the library lacks an op.
    """
    missing = [name for name, _ in COMPILED.values() if not hasattr(namespace, name)]
    if missing:
        raise ConfigError(
            f"{library} has no op {missing[0]}: it was built for another version of hf_sparsekv; build it anew with"
            " `python kernels/build.py`"
        )
    found = {ours: launcher(ours, getattr(namespace, name).default, names) for ours, (name, names) in COMPILED.items()}
    return SimpleNamespace(**found, decode_workspace_bytes=namespace.decode_workspace_bytes.default)


def launcher(op: str, compiled: Callable[..., None], renamed: Mapping[str, str]) -> Callable[..., None]:
    """Calls a compiled op. What it refuses is an InputError; its other errors pass.

    Args:
        op: our name of it.
        compiled: the op.
        renamed: our names of its arguments, where they differ.
    """

    def launch(*args: Any) -> None:
        try:
            compiled(*args)
        except RuntimeError as error:
            refusal = _REFUSAL.search(str(error))
            if refusal is None:
                raise
            told = re.sub(r"`(\w+)`", lambda name: f"`{renamed.get(name[1], name[1])}`", refusal[1])
            raise InputError(f"{op}: {told}") from error

    return launch
