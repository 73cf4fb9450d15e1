"""Once: what all processes of a launch would say, such as a wrong option, is said by the first of them."""

import hashlib
import os
from datetime import timedelta

_CONNECT_S = 5.0
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Whether the launcher holds a store that outlives its processes: torchrun and `accelerate launch` do."""


def may_say(message: str, *, is_consequence: bool = False) -> bool:
    """Whether this process should print an error that ends it. Where there is nobody to ask, it should.

    Args:
        message: two of the same words are one error.
        is_consequence: of another process's end, which will have said why.
    """
    if os.environ.get(_AGENT) != "True" or os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not before something has gone wrong

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False)
        attempt = f"hf-sparsekv/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        is_first = store.add(f"{attempt}/{hashlib.sha256(message.encode()).hexdigest()}", 1) == 1
        num_said: int = store.add(f"{attempt}/said", int(is_first))
    except (KeyError, ValueError, RuntimeError):
        return True
    return is_first and (num_said == 1 or not is_consequence)
