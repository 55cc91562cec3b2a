"""Marks notice what torch does to tensors."""

import gc
import weakref

import torch

from selfnorm.runtime.marks import marks_of, unchanged


def test_marks_hold_until_a_tensor_is_written_moved_or_replaced():
    tensors = [torch.zeros(3), torch.zeros(3)]
    marks = marks_of(tensors)
    assert unchanged(tensors, marks) and not unchanged(tensors[:1], marks) and not unchanged(tensors[::-1], marks)
    tensors[0].add_(1)
    assert not unchanged(tensors, marks)
    marks = marks_of(tensors)
    tensors[1].data = torch.ones(3)
    assert not unchanged(tensors, marks)
    marks = marks_of(tensors)
    tensors[0] = tensors[0].clone()
    assert not unchanged(tensors, marks)


def test_another_tensor_at_the_same_address_is_another_tensor():
    memory = torch.zeros(3)
    marks = marks_of([memory.view(3)])
    gc.collect()
    assert not unchanged([memory.view(3)], marks)


def test_the_result_of_a_computation_is_new_each_time_and_does_not_stay_alive():
    weight = torch.zeros(3, requires_grad=True)
    result = weight * 2
    marks, alive = marks_of([result]), weakref.ref(result)
    assert not unchanged([result], marks)
    del result
    assert alive() is None


def test_tensors_can_be_swapped():
    one, other = torch.zeros(3), torch.ones(3)
    marks = marks_of([one])
    torch.utils.swap_tensors(one, other)
    assert not unchanged([one], marks)


def test_tensors_of_inference_mode_have_marks():
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert unchanged([tensor], marks_of([tensor]))
