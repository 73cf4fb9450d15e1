"""The package's public names: there when asked for, and hidden by no module."""

from pathlib import Path

import pytest

import hf_sparsekv

FOLDER = Path(hf_sparsekv.__file__).parent


@pytest.mark.parametrize("name", hf_sparsekv.__all__)
def test_a_public_name_can_be_had_and_is_listed(name):
    assert getattr(hf_sparsekv, name) is not None
    assert name in dir(hf_sparsekv)


def test_no_module_has_a_public_name():
    """Importing it would put the module in the name's place."""
    modules = {path.stem for path in FOLDER.iterdir()}
    assert not modules & set(hf_sparsekv.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        hf_sparsekv.generat  # noqa: B018
