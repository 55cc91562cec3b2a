"""Batches seeded by counters are repeatable and complete, and augmented like an independent implementation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from selfnorm.data.batches import Examples, TrainingBatches, augment, dequantise, generator_for

CPU = torch.device("cpu")


def images(n=23, channels=2, side=6):
    return torch.arange(n * channels * side * side).reshape(n, channels, side, side).remainder(251).to(torch.uint8)


def test_generators_depend_on_every_counter():
    def draw(*counters):
        return torch.rand(4, generator=generator_for(CPU, *counters))

    assert torch.equal(draw(1, "order", 2, 3), draw(1, "order", 2, 3))
    others = [(2, "order", 2, 3), (1, "batch", 2, 3), (1, "order", 3, 3), (1, "order", 2, 4), (12, "order", 3), (1, "order", 23)]
    assert all(not torch.equal(draw(1, "order", 2, 3), draw(*other)) for other in others)


def test_any_step_can_be_made_again_in_any_order():
    def batches():
        return TrainingBatches(Examples(images(), 256, CPU), 5, seed=3, flip=True, jitter=1)

    first = {(epoch, step): batches().batch(epoch, step) for epoch in (0, 1) for step in range(4)}
    again = batches()
    for key in reversed(first):
        assert torch.equal(again.batch(*key), first[key])


def test_an_epoch_shows_each_example_at_most_once_and_epochs_differ():
    batches = TrainingBatches(Examples(torch.arange(23.0)[:, None], None, CPU), 5, seed=0)
    assert batches.steps_per_epoch == 4
    epochs = [torch.cat([batches.batch(epoch, step) for step in range(4)]).flatten() for epoch in range(12)]
    assert all(len(set(epoch.tolist())) == 20 for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    assert set(torch.cat(epochs).tolist()) == set(range(23)), "who sits out an epoch comes in another"


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_blocks_are_the_epochs_order_in_pieces(block):
    batches = TrainingBatches(Examples(torch.arange(23.0)[:, None], None, CPU), 4, seed=0)
    batches.block = block
    pieces = [batches.index(1, number) for number in range(-(-5 // block))]
    assert torch.equal(torch.cat(pieces), batches.order(1)[:20])
    assert [len(piece) for piece in pieces[:-1]] == [4 * block] * (len(pieces) - 1)
    for number in (-1, len(pieces)):
        with pytest.raises(IndexError, match=f"expected the number of a block of {block} among 5 steps, got {number}"):
            batches.index(1, number)


def test_a_small_data_set_is_one_batch():
    batches = TrainingBatches(Examples(torch.zeros(7, 2), None, CPU), 100, seed=0)
    assert (batches.batch_size, batches.steps_per_epoch) == (7, 1)


def test_dequantisation_is_uniform_within_each_level():
    x = images()
    y = dequantise(x, 256, torch.float64, generator_for(CPU, 0))
    noise = y - x
    assert noise.min() >= 0
    assert noise.max() < 1
    assert abs(noise.mean() - 0.5) < 0.03
    assert abs(noise.var() - 1 / 12) < 0.01
    assert y.dtype == torch.float64
    table = torch.randn(4, 2)
    assert torch.equal(dequantise(table, None, torch.float64, generator_for(CPU, 0)), table)


def test_flipping_mirrors_about_half_of_the_images():
    x = images(200)
    y = augment(x, flip=True, jitter=0, generator=generator_for(CPU, 1))
    mirrored = [torch.equal(b, a.flip(-1)) for a, b in zip(x, y, strict=True)]
    kept = [torch.equal(b, a) for a, b in zip(x, y, strict=True)]
    assert all(m != k for m, k in zip(mirrored, kept, strict=True))
    assert 70 < sum(mirrored) < 130


@pytest.mark.parametrize("jitter", [1, 2])
def test_jitter_is_a_random_crop_of_the_reflected_image(jitter):
    x = images(300)
    y = augment(x, flip=False, jitter=jitter, generator=generator_for(CPU, 1))
    padded = F.pad(x.double(), [jitter] * 4, mode="reflect").to(torch.uint8)
    span = range(2 * jitter + 1)
    crops = torch.stack([padded[:, :, i : i + 6, j : j + 6] for i in span for j in span])
    hits = (crops == y).flatten(2).all(-1)
    assert hits.any(0).all(), "every result is one of the crops"
    assert hits.any(1).all(), "and every crop comes up"


def test_evaluation_takes_all_examples_in_order_with_fixed_noise():
    x = images()
    examples = Examples(x, 256, CPU)
    first = torch.cat(list(examples.in_order(5, seed=0)))
    assert torch.equal(first.floor().to(torch.uint8), x)
    assert torch.equal(first, torch.cat(list(examples.in_order(5, seed=0))))
    assert not torch.equal(first, torch.cat(list(examples.in_order(5, seed=0, sample=1))))


def test_a_memory_map_is_read_batch_by_batch(tmp_path):
    np.save(tmp_path / "x.npy", images().numpy())
    mapped = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    kept, streamed = (TrainingBatches(Examples(x, 256, CPU), 5, seed=0) for x in (images(), mapped))
    assert streamed.examples.stored.data_ptr() == mapped.data_ptr(), "not copied"
    assert torch.equal(kept.batch(1, 2), streamed.batch(1, 2))


@pytest.mark.gpu
def test_data_lives_on_the_device_if_it_fits():
    device = torch.accelerator.current_accelerator()
    examples = Examples(images(), 256, device)
    assert examples.stored.device.type == device.type
    assert examples.stored.dtype == torch.uint8
    batches = TrainingBatches(examples, 5, seed=0, flip=True, jitter=1)
    assert torch.equal(batches.batch(1, 2), TrainingBatches(Examples(images(), 256, device), 5, 0, True, 1).batch(1, 2))
    streamed = Examples(images(), 256, device)
    streamed.stored = images()  # as if it did not fit on the device
    assert torch.equal(streamed.gather(torch.tensor([3, 1])), examples.gather(torch.tensor([3, 1])))


@pytest.mark.parametrize(
    ("shape", "flip", "jitter", "words"),
    [((5, 3), True, 0, "images"), ((5, 1, 4, 4), False, 4, "jitter"), ((5, 3), False, 1, "images")],
)
def test_augmentation_that_makes_no_sense_is_refused(shape, flip, jitter, words):
    with pytest.raises(ValueError, match=words):
        TrainingBatches(Examples(torch.zeros(shape), None, CPU), 2, 0, flip, jitter)
