"""The number of CPU threads within a block."""

import pytest
import torch

from selfnorm.runtime.threads import cpu_threads


def test_the_number_of_threads_is_restored_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), cpu_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        raise KeyError
    assert torch.get_num_threads() == before


def test_none_changes_nothing():
    before = torch.get_num_threads()
    with cpu_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
