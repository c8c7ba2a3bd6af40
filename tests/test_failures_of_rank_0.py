"""What rank 0 does for all ranks and fails at: every rank hears of it, as one clear error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hgraph.errors import HydraulisError, InvalidInput, RankFailed
from hgraph.strategy import Scheme
from runtime.checkpoint.run import _on_rank_0
from runtime.cluster import Cluster
from tests.gloo_workers import GlooPool
from tests.saved_runs import program
from tests.small_pools import pool, strategy


class _Wire:
    """Two clusters of one process each, one after the other: what rank 0 broadcasts is pickled, as in real jobs."""

    def __init__(self) -> None:
        self.content: bytes | None = None

    def cluster(self, rank: int) -> Cluster:
        return cast("Cluster", _Process(self, rank))


class _Process:
    def __init__(self, wire: _Wire, rank: int) -> None:
        self.wire, self.local_ranks = wire, (rank,)

    def broadcast(self, value: Any, *, aside: bool = False) -> Any:
        del aside
        if self.local_ranks == (0,):
            self.wire.content = pickle.dumps(value)
            return value
        assert self.wire.content is not None, "rank 0 sent nothing: the others would wait"
        return pickle.loads(self.wire.content)


class _Unknown(Exception):
    """Of another library, with a constructor of its own, so that it does not survive being pickled."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


def _raises(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


FAILURES: list[tuple[Exception, type[HydraulisError], str]] = [
    (InvalidInput("wrong folder"), InvalidInput, "wrong folder"),
    (OSError(28, "No space left on device"), InvalidInput, "checkpoint: [Errno 28] No space left on device"),
    (KeyError("seed"), RankFailed, "checkpoint: rank 0: KeyError: 'seed'"),
    (_Unknown(3, "no answer"), RankFailed, "checkpoint: rank 0: _Unknown: no answer (3)"),
    (MemoryError(), RankFailed, "checkpoint: rank 0: MemoryError: "),
]


@pytest.mark.parametrize(("error", "kind", "text"), FAILURES, ids=lambda item: type(item).__name__)
def test_every_rank_hears_of_it(error: Exception, kind: type[HydraulisError], text: str) -> None:
    wire = _Wire()
    for rank in (0, 1):
        with pytest.raises(HydraulisError) as caught:
            _on_rank_0(wire.cluster(rank), _raises(error))
        assert type(caught.value) is kind and str(caught.value) == text
        if rank == 0:
            assert error in (caught.value, caught.value.__cause__), "the trace of rank 0 leads to where it was"


def test_what_it_returns_is_had_by_all() -> None:
    wire = _Wire()
    assert [_on_rank_0(wire.cluster(rank), lambda: 5) for rank in (0, 1)] == [5, 5]


def test_weights_that_cannot_be_written(tmp_path: Path) -> None:
    run = program(pool(1, strategy("tp1", Scheme.uniform())))
    (tmp_path / "weights.safetensors.tmp").mkdir()
    with pytest.raises(InvalidInput) as caught:
        run.export_weights(tmp_path / "weights.safetensors")
    text = str(caught.value)
    assert text.startswith(f"export_weights: {tmp_path}/weights.safetensors cannot be written: ")
    assert "directory" in text


def export_twice(folder: str) -> str:
    """Returns what an export that fails says on this rank; the next one succeeds."""
    torch.set_num_threads(1)
    run = program(pool(2, strategy("tp2", Scheme.uniform(2))))
    try:
        run.export_weights(Path(folder) / "refused")
    except InvalidInput as error:
        run.export_weights(Path(folder) / "written")
        return str(error)
    return "nothing was refused"


@pytest.mark.gloo
def test_processes_hear_of_it_and_go_on(gloo: GlooPool, tmp_path: Path) -> None:
    (tmp_path / "refused.tmp").mkdir()
    texts = gloo.run(export_twice, str(tmp_path), num_ranks=2)
    assert texts[0] == texts[1] and texts[0].startswith(f"export_weights: {tmp_path}/refused cannot be written: ")
    assert (tmp_path / "written").is_file()
