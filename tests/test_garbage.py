"""The collector of cyclic garbage pauses while a model is traced, and goes on as before."""

from __future__ import annotations

import gc

import pytest
from torch import nn

from hgraph.capture import capture
from hgraph.data import Packed
from hgraph.errors import CaptureError
from hgraph.garbage import collector_paused
from tests.models import Tiny, language_loss


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            with collector_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with pytest.raises(KeyError), collector_paused():
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_it_pauses_while_a_model_is_traced_also_into_an_error() -> None:
    seen = []

    def loss(model: nn.Module, packed: Packed) -> object:
        seen.append(gc.isenabled())
        return language_loss(model, packed) if len(seen) < 3 else None

    capture(Tiny(), loss)  # type: ignore[arg-type]
    with pytest.raises(CaptureError):
        capture(Tiny(), loss)  # type: ignore[arg-type]
    assert set(seen) == {False} and gc.isenabled()
