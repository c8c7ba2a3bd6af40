"""Sizes of buckets: megabytes to elements, and what is no size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hgraph.errors import InvalidInput
from runtime.bridge_planner import bucket_elements


def test_megabytes_are_millions_of_bytes() -> None:
    assert bucket_elements(25, torch.float32) == 6_250_000 and bucket_elements(0.5, torch.float64) == 62_500
    assert bucket_elements(np.float32(1), torch.bfloat16) == 500_000  # type: ignore[arg-type]
    assert bucket_elements(1e-9, torch.float32) == 1, "at least one"
    assert bucket_elements(1e12, torch.float32) == 25 * 10**16


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "bucket_mb: expected a size above 0 MB, got 0"),
        (-1.5, "bucket_mb: expected a size above 0 MB, got -1.5"),
        (float("nan"), "bucket_mb: expected a size above 0 MB, got nan"),
        (
            float("inf"),
            "bucket_mb: expected a size of at most 1e+12 MB, got inf; for one bucket, any size above that of all "
            "tensors together will do",
        ),
        (1e300, "bucket_mb: expected a size of at most 1e+12 MB, got 1e+300; for one bucket, any size above"),
        ("25", "bucket_mb: expected a number of MB, got str '25'; write it without quotes"),
        (None, "bucket_mb: expected a number of MB, got NoneType None"),
        (True, "bucket_mb: expected a number of MB, got bool True"),
    ],
)
def test_what_is_no_size(size: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        bucket_elements(size, torch.float32)
    assert str(caught.value).startswith(text)
