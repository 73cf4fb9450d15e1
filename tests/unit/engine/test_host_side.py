"""The rooms that decide run where there is no torch."""

import subprocess
import sys
from pathlib import Path

import hf_sparsekv

# The package's own __init__ imports torch, so empty packages stand in for it and for the engine's.
PROGRAM = """
import sys, types
root = sys.argv[1]
for name, path in (("hf_sparsekv", root), ("hf_sparsekv.engine", root + "/engine")):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
for name in ("torch", "transformers"):
    sys.modules[name] = None  # importing it raises
from hf_sparsekv.engine import block_pool, request, scheduler, tables
scheduler = scheduler.Scheduler(
    block_pool.BlockPool(8), block_size=2, max_num_seqs=2, max_batch_tokens=4, max_model_len=8
)
assert scheduler.schedule().is_empty
print("decided")
"""


def test_pool_tables_requests_and_scheduler_import_no_torch():
    root = Path(hf_sparsekv.__file__).parent
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(root)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "decided\n"), done.stderr
