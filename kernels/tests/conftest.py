"""Lets the tests import `helpers` and an uninstalled `hf_sparsekv`, whatever pytest's import mode."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parent
for folder in (_TESTS, _TESTS.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
