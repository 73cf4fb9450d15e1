"""LateCheck on the CPU, where it is never late; `tests/gpu/test_late_check.py` has what only a GPU can show."""

import copy
import pickle

import pytest
import torch

from hf_sparsekv.cache.late_check import LateCheck
from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.errors import CacheError, InputError

YES, NO = torch.tensor(True), torch.tensor(False)


def noted(*conditions):
    check = LateCheck()
    for condition in conditions:
        check.note(condition)
    return check


@pytest.mark.parametrize(
    ("conditions", "has_failed"), [((), False), ((YES, YES), False), ((NO,), True), ((YES, NO, YES), True)]
)
@pytest.mark.parametrize(
    "copied", [lambda check: check, copy.deepcopy, lambda check: pickle.loads(pickle.dumps(check))]
)
def test_one_failure_is_enough_and_copies_know_of_it(conditions, has_failed, copied):
    check = copied(noted(*conditions))
    assert check.has_failed() == check.will_fail() == has_failed
    check.note(YES)
    assert check.has_failed() == check.will_fail() == has_failed


def test_conditions_are_read_when_noted_and_not_changed():
    condition = torch.tensor(True)
    check = noted(condition)
    condition.fill_(False)
    assert not check.will_fail()
    other = torch.tensor(False)
    check.note(other)
    check.note(YES)
    assert not other
    assert YES


def mask(*rows):
    """`mask(".xx", "xxx")`: x = token."""
    return torch.tensor([[character == "x" for character in row] for row in rows])


@pytest.mark.parametrize(
    ("history", "given", "is_decode", "error"),
    [
        (("xxx", "xxx"), None, True, None),
        (("xxx", "xxx"), ("xxxx", "xxxx"), True, None),
        (("xxx", "xxx"), ("xxxx", "xxx."), True, CacheError),
        (("xxx", "xxx"), ("xxxx", "xxx."), False, None),
        (("xxx", "xxx"), ("xxxx", "x.xx"), True, InputError),
        (("xxx", "xxx"), ("xxxx", "x.xx"), False, InputError),
        ((".xx", "xxx"), None, True, InputError),
        ((".xx", "xxx"), None, False, InputError),
        ((".xx", "xxx"), (".xxx", "xxxx"), True, None),
        ((".xx", "xxx"), (".xx.", "xxxx"), True, CacheError),
        ((".xx", "xxx"), (".xx..", "xxx.x"), False, None),
        ((".xx", "xxx"), ("xxxx", "xxxx"), True, InputError),
        ((".xx", "xxx"), (".xxx", ".xxx"), False, InputError),
    ],
)
def test_what_a_mask_may_say_of_a_history(history, given, is_decode, error):
    padding = Padding()
    padding.extend(2, 3, mask(*history))
    before = (list(padding.tokens), padding.num_columns)
    given = None if given is None else mask(*given)
    if error is None:
        padding.check_mask(2, given, is_decode)
    else:
        with pytest.raises(error):
            padding.check_mask(2, given, is_decode)
    assert (padding.tokens, padding.num_columns) == before


def test_a_first_prompt_may_have_any_mask_and_another_batch_is_refused():
    padding = Padding()
    padding.check_mask(2, mask(".xx", "..x"), False)
    padding.check_mask(2, None, False)
    padding.extend(2, 3, mask(".xx", "..x"))
    with pytest.raises(CacheError, match="holds 2 requests, got a batch of 3"):
        padding.check_mask(3, mask(".xxx", "..xx", "xxxx"), True)
