"""What made the results of a batch run, beside them: a damaged file of that is not taken for none."""

import json

import pytest

from hf_sparsekv.engine.batch_options import check_options, options_of
from hf_sparsekv.errors import InputError

OPTIONS = {"budget": 40, "do_sample": False}


def check(output, options=OPTIONS, *, has_results=True, may_mix=False):
    check_options(output, options, has_results=has_results, may_mix=may_mix)


@pytest.fixture
def output(tmp_path):
    """Of a run that has written its options down."""
    output = tmp_path / "out.jsonl"
    check(output, has_results=False)
    assert json.loads(options_of(output).read_bytes()) == OPTIONS
    return output


@pytest.mark.parametrize("left", [b"", b"{torn", b"[1]", b"\xff", b"[" * 100_000])
def test_options_that_can_no_longer_be_read_are_an_error_with_a_way_out(output, left):
    path = options_of(output)
    path.write_bytes(left)
    for options in (OPTIONS, OPTIONS | {"budget": 50}):
        with pytest.raises(InputError, match="if they are the same, remove it, else give another -o") as error:
            check(output, options)
        assert str(path) in str(error.value)
        assert path.read_bytes() == left
    path.unlink()
    check(output)


def test_what_is_there_but_is_no_file_is_an_error(output):
    options_of(output).unlink()
    options_of(output).mkdir()
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory: it says with which options"):
        check(output)


def test_damaged_options_matter_neither_without_results_nor_to_who_mixes(output):
    path = options_of(output)
    path.write_bytes(b"{torn")
    check(output, may_mix=True)
    assert path.read_bytes() == b"{torn"
    check(output, has_results=False)
    assert json.loads(path.read_bytes()) == OPTIONS


def test_an_option_that_a_former_run_did_not_know_is_written_down(output):
    check(output, OPTIONS | {"seed": 1})
    with pytest.raises(InputError, match="seed was 1, is 2"):
        check(output, OPTIONS | {"seed": 2})
