"""Tiny files in the formats of MNIST and CIFAR-10."""

import struct

import numpy as np

from selfnorm.data import cifar10, mnist


def idx(count, magic=2051, sides=(28, 28), seed=0):
    """Returns the bytes of an idx file of random images, and the images."""
    images = np.random.RandomState(seed).randint(256, size=(count, *sides)).astype(np.uint8)
    return struct.pack(">4I", magic, count, *sides) + images.tobytes(), images


def shrink_mnist(monkeypatch):
    """Shrinks MNIST to 7 training images, of which 3 are for validation, and 2 test images; returns files and images."""
    monkeypatch.setattr(mnist, "IMAGES_IN_FILE", {mnist.TRAIN_FILE: 7, mnist.TEST_FILE: 2})
    monkeypatch.setattr(mnist, "MNIST_VALIDATION_SIZE", 3)
    train, train_images = idx(7, seed=1)
    test, test_images = idx(2, seed=2)
    return {mnist.TRAIN_FILE: train, mnist.TEST_FILE: test}, train_images, test_images


def shrink_cifar10(monkeypatch):
    """Shrinks CIFAR-10 to 2 records per file, whose first pixel identifies file and record; returns the files."""
    monkeypatch.setattr(cifar10, "IMAGES_PER_FILE", 2)
    files = {}
    for number, name in enumerate(cifar10.CIFAR10_CHECKSUMS):
        records = np.random.RandomState(number).randint(256, size=(2, cifar10.RECORD_BYTES)).astype(np.uint8)
        records[:, 0] = 9
        records[:, 1] = 2 * number, 2 * number + 1
        files[name] = records.tobytes()
    return files


def write_columns(path, header, *columns):
    """Writes columns of numbers or text as CSV."""
    rows = [header, *(",".join(map(str, row)) for row in zip(*columns, strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return path
