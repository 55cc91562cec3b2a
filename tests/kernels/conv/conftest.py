"""A fixture for the kernels of convolutions."""

import pytest


@pytest.fixture
def short_sums(monkeypatch):
    """Two rows at a time, so that few images make several steps."""
    from selfnorm.kernels.conv import selfnorm as conv
    from selfnorm.kernels.conv import series

    of_images, of_batch = conv.image_sum_tiles, series.batch_sum_tiles
    monkeypatch.setattr(conv, "image_sum_tiles", lambda rows: of_images(32 * rows) | {"ROWS": 2})
    monkeypatch.setattr(series, "batch_sum_tiles", lambda rows, examples: of_batch(64 * rows, 64 * examples) | {"ROWS": 2})
    return of_images
