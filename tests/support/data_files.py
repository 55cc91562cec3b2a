"""Tiny MNIST and CIFAR-10 files."""

import struct

import numpy as np

from selfnorm.data import cifar10, mnist


def idx(count, magic=2051, sides=(28, 28), seed=0):
    """An idx file of random images, and those images."""
    images = np.random.RandomState(seed).randint(256, size=(count, *sides)).astype(np.uint8)
    return struct.pack(">4I", magic, count, *sides) + images.tobytes(), images


def shrink_mnist(monkeypatch):
    """MNIST with 7 training images, of which 3 for validation, and 2 for the test."""
    monkeypatch.setattr(mnist, "IMAGES_IN_FILE", {mnist.TRAIN_FILE: 7, mnist.TEST_FILE: 2})
    monkeypatch.setattr(mnist, "MNIST_VALIDATION_SIZE", 3)
    train, train_images = idx(7, seed=1)
    test, test_images = idx(2, seed=2)
    return {mnist.TRAIN_FILE: train, mnist.TEST_FILE: test}, train_images, test_images


def shrink_cifar10(monkeypatch):
    """CIFAR-10 with 2 records a file, whose pixels say which file and record they are of."""
    monkeypatch.setattr(cifar10, "IMAGES_PER_FILE", 2)
    files = {}
    for number, name in enumerate(cifar10.CIFAR10_CHECKSUMS):
        records = np.random.RandomState(number).randint(256, size=(2, cifar10.RECORD_BYTES)).astype(np.uint8)
        records[:, 0] = 9
        records[:, 1] = 2 * number, 2 * number + 1
        files[name] = records.tobytes()
    return files
