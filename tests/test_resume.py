"""Saved under one pool, resumed under another: what follows equals the run that was never interrupted, to 1e-10."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hgraph.data import IGNORED_LABEL, BatchState, Packed
from hgraph.strategy import Pool, Scheme
from runtime.program import Program
from runtime.step_output import StepOutput
from tests.gloo_workers import DEAD, GlooPool, WorkersFailed
from tests.models import llama
from tests.saved_runs import FOUR, OPTIMIZER, assert_same_state, batches, model, program, state_of, train
from tests.small_pools import exact_program, overridden, pool, stages, strategy

U = Scheme.uniform
OTHERS = {
    "1 rank": pool(1, strategy("tp1", U())),
    "2 ranks": pool(2, strategy("pp2", U(1, 2)), strategy("tp1x2", U(), U())),
    "3 ranks": pool(3, strategy("tp2+tp1", U(2), U()), strategy("tp3", U(3))),
    "8 ranks": pool(
        8, strategy("unequal", U(3), U(2), U(1, 2), U()), strategy("tp3,tp1 x2", *[stages((3, 1), (1, 1))] * 2)
    ),
}
EXACT, TP2 = pool(4, strategy("tp2+tp1x2", U(2), U(), U())), pool(2, strategy("tp2", U(2)))
TP1X4, TP1X2 = pool(4, strategy("tp1x4", *[U()] * 4)), pool(2, strategy("tp1x2", U(), U()))


@dataclass(frozen=True, slots=True)
class Unbroken:
    """A run of nine steps on {tp=2} and twice {tp=1}, saved after three and, at the end of an epoch, after seven."""

    folder: Path
    steps: list[StepOutput]
    states: dict[int, dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    folder, run = tmp_path_factory.mktemp("checkpoints"), program(EXACT)
    steps, states = [], {}
    for last in (3, 6, 7, 9):
        steps += train(run, last)
        states[last] = state_of(run)
        if last in (3, 7):
            run.save(folder, batches=batches())
    assert batches().shuffle and OPTIMIZER.max_grad_norm is not None
    assert all(step.grad_norm > OPTIMIZER.max_grad_norm for step in steps), "every step is clipped"
    assert len({step.learning_rate for step in steps}) == 9, "and has a learning rate of its own"
    return Unbroken(folder, steps, states)


def assert_same_steps(got: list[StepOutput], expected: list[StepOutput]) -> None:
    assert [step.step for step in got] == [step.step for step in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-10, abs=0)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-10, abs=0)
        assert (ours.learning_rate, ours.tokens) == (theirs.learning_rate, theirs.tokens)


@pytest.mark.case(113)
@pytest.mark.parametrize("ranks", OTHERS)
def test_steps_4_to_6_equal_the_unbroken_run(unbroken: Unbroken, ranks: str) -> None:
    resumed = program(OTHERS[ranks], model(seed=1))
    assert resumed.load(unbroken.folder / "step-000003", batches=batches()) == unbroken.folder / "step-000003"
    assert resumed.step_count == 3
    loaded = state_of(resumed)
    assert all(
        torch.equal(loaded[kind][name], tensor)
        for kind, tensors in unbroken.states[3].items()
        for name, tensor in tensors.items()
    )
    steps = train(resumed, 6)
    assert {step.strategy for step in steps} == {strategy.name for strategy in OTHERS[ranks].strategies}
    assert_same_steps(steps, unbroken.steps[3:6])
    assert_same_state(state_of(resumed), unbroken.states[6])


@pytest.mark.case(113)
def test_from_tensor_to_pipeline_parallel_and_to_unequal_replicas(unbroken: Unbroken, tmp_path: Path) -> None:
    saved = program(TP2)
    train(saved, 3)
    saved.save(tmp_path, batches=batches())
    for other in (pool(2, strategy("pp2", U(1, 2))), pool(3, strategy("tp2+tp1", U(2), U()))):
        resumed = program(other, model(seed=1))
        resumed.load(tmp_path, batches=batches())
        assert all(state.optimizer.step_count == 3 for state in resumed.ranks.values())
        assert_same_steps(train(resumed, 6), unbroken.steps[3:6])
        assert_same_state(state_of(resumed), unbroken.states[6])


@pytest.mark.case(119)
def test_the_docs_name_the_pools_that_the_tests_above_resume_under() -> None:
    page = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    rows = [_row("saved on", FOUR), _row("saved on", TP2), *(_row("resumed on", other) for other in OTHERS.values())]
    table = "| | ranks | strategies of the pool |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    assert table in page, f"expected this table:\n{table}"


def _row(what: str, pool: Pool) -> str:
    texts = [" + ".join(str(replica.scheme) for replica in strategy.replicas) for strategy in pool.strategies]
    return f"| {what} | {pool.num_ranks} | {'; '.join(f'`{text}`' for text in texts)} |"


@pytest.mark.case(111)
def test_the_order_goes_on_at_the_end_of_an_epoch(unbroken: Unbroken) -> None:
    resumed = program(OTHERS["2 ranks"], model(seed=1))
    resumed.load(unbroken.folder, batches=batches())
    assert resumed.next_batch == BatchState(epoch=1, position=0, index=7), "the last checkpoint is meant"
    assert_same_steps(train(resumed, 9), unbroken.steps[7:])
    assert_same_state(state_of(resumed), unbroken.states[9])


REPLICAS = {
    "4 to 2": (TP1X4, TP1X2),
    "2 to 4": (TP1X2, TP1X4),
    "3 to 2, unequal": (EXACT, pool(3, strategy("tp2+tp1", U(2), U()))),
}


@pytest.mark.case(109, 110, 111)
@pytest.mark.parametrize(("before", "after"), REPLICAS.values(), ids=REPLICAS)
def test_every_sequence_is_seen_once_an_epoch_across_a_change_of_replicas(
    tmp_path: Path, before: Pool, after: Pool
) -> None:
    first, second = program(before), program(after)
    seen = _ids_trained_on(first, 3)
    first.save(tmp_path, batches=batches())
    second.load(tmp_path, batches=batches())
    seen += _ids_trained_on(second, 7)
    assert sorted(seen) == list(range(25))
    order = [index for batch, _ in zip(batches(), range(7), strict=False) for index in batch.ids]
    assert seen == order, "in the order of the unbroken run"


def _ids_trained_on(run: Program, last_step: int) -> list[int]:
    order = [batch.ids for batch, _ in zip(batches(run.next_batch), range(last_step), strict=False)]
    steps = train(run, last_step)
    # By the plans: what each replica was given of each batch.
    given = [
        sorted(
            ids[index]
            for replica in step.plan.replicas
            for micro_batch in replica.micro_batches
            for index in micro_batch
        )
        for ids, step in zip(order, steps, strict=False)
    ]
    assert given == [sorted(ids) for ids in order[: len(steps)]]
    return [index for ids in order[: len(steps)] for index in ids]


@pytest.mark.case(91)
def test_a_vocabulary_that_does_not_divide_is_saved_without_padding(tmp_path: Path) -> None:
    sizes = {"hidden": 24, "ffn": 25, "vocab_size": 7}
    saved, loaded = (
        program(pool(2, strategy("tp2", U(2))), llama(**sizes)),
        program(OTHERS["1 rank"], llama(1, **sizes)),
    )
    checkpoint = saved.save(tmp_path)
    loaded.load(tmp_path)
    whole, shapes = _whole_tensors(checkpoint), {name: p.shape for name, p in saved.model.named_parameters()}
    assert shapes["embed.weight"] == (7, 24)
    kinds = ("weights", "exp_avg", "exp_avg_sq")
    assert {key: t.shape for key, t in whole.items()} == {
        f"{kind}.{name}": shape for kind in kinds for name, shape in shapes.items()
    }
    loaded.export_weights(tmp_path / "weights.safetensors")
    for weights in (loaded.state_dict(), load_file(tmp_path / "weights.safetensors")):
        assert {name: tensor.shape for name, tensor in weights.items()} == shapes
        assert all(torch.equal(weights[name], tensor) for name, tensor in saved.state_dict().items())


@pytest.mark.case(103)
def test_tied_weights_built_on_meta_go_on_where_they_were(tmp_path: Path) -> None:
    def tied() -> torch.nn.Module:
        with torch.device("meta"):
            return model(tie_embeddings=True)

    run, resumed = program(FOUR, tied(), seed=5), program(OTHERS["3 ranks"], tied(), seed=6)
    train(run, 2)
    checkpoint = run.save(tmp_path, batches=batches())
    resumed.load(tmp_path, batches=batches())
    assert resumed.seed == 5
    weights = [key for key in _whole_tensors(checkpoint) if key in ("weights.embed.weight", "weights.head.weight")]
    assert weights == ["weights.embed.weight"], "one parameter, saved once"
    assert_same_steps(train(resumed, 4), train(run, 4))
    assert_same_state(state_of(resumed), state_of(run))


@pytest.mark.case(103)
def test_weights_that_are_equal_but_not_one_are_both_saved(tmp_path: Path) -> None:
    def untied(seed: int) -> torch.nn.Module:
        own = model(seed, tie_embeddings=True)
        own.head.weight = torch.nn.Parameter(own.embed.weight.detach().clone())
        return own

    run, resumed = program(TP2, untied(0)), program(OTHERS["3 ranks"], untied(1))
    train(run, 2)
    checkpoint = run.save(tmp_path, batches=batches())
    resumed.load(tmp_path, batches=batches())
    whole = _whole_tensors(checkpoint)
    assert not torch.equal(whole["weights.embed.weight"], whole["weights.head.weight"])
    assert_same_steps(train(resumed, 4), train(run, 4))
    assert_same_state(state_of(resumed), state_of(run))


class Plain(torch.nn.Module):
    """Two parameters that no template knows: nothing says how they are laid out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.cut = torch.nn.Parameter(torch.randn(7, 4, dtype=torch.float64, generator=generator))
        self.whole = torch.nn.Parameter(torch.randn(5, dtype=torch.float64, generator=generator))


def plain_loss(own: torch.nn.Module, packed: Packed) -> Tensor:
    return ((own.cut * own.cut).sum() + own.whole.sum()) * (packed.labels != IGNORED_LABEL).sum()


@pytest.mark.case(117)
@pytest.mark.parametrize("there_and_back", [False, True])
def test_a_parameter_that_is_cut_on_one_side_alone(tmp_path: Path, there_and_back: bool) -> None:
    """By an annotation with sizes of its own, and without one on the other side: shapes come from the boxes."""
    cut, bare = pool(3, strategy("cut", overridden(3, cut="0-2[S(0:4,0,3)]"))), pool(2, strategy("bare", U(2)))
    first, second = (bare, cut) if there_and_back else (cut, bare)
    run, resumed = (exact_program(Plain(seed), plain_loss, own) for seed, own in enumerate((first, second)))
    train(run, 2)
    run.save(tmp_path)
    resumed.load(tmp_path)
    for kind, tensors in state_of(run).items():
        assert all(torch.equal(state_of(resumed)[kind][name], tensor) for name, tensor in tensors.items())
    assert_same_steps(train(resumed, 4), train(run, 4))
    assert_same_state(state_of(resumed), state_of(run))


def test_frozen_parameters_are_saved_too(tmp_path: Path) -> None:
    def frozen(seed: int) -> torch.nn.Module:
        own = model(seed)
        own.embed.weight.requires_grad_(False)
        return own

    run, resumed = program(FOUR, frozen(0)), program(OTHERS["2 ranks"], frozen(1))
    train(run, 1)
    run.save(tmp_path)
    resumed.load(tmp_path)
    assert torch.equal(resumed.state_dict()["embed.weight"], run.state_dict()["embed.weight"])
    assert_same_steps(train(resumed, 2), train(run, 2))


def test_tools_of_torch_read_a_checkpoint(unbroken: Unbroken) -> None:
    whole = _whole_tensors(unbroken.folder / "step-000003")
    for kind, key in (("master", "weights"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        for name, tensor in unbroken.states[3][kind].items():
            assert torch.equal(whole[f"{key}.{name}"], tensor)


def _whole_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Reads by nothing of ours."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, checkpoint.parent / "whole.pt")
    return torch.load(checkpoint.parent / "whole.pt")


@pytest.mark.parametrize("tie", [False, True])
def test_exported_weights_load_into_the_plain_model(tmp_path: Path, tie: bool) -> None:
    run, plain = program(FOUR, model(tie_embeddings=tie)), model(seed=1, tie_embeddings=tie)
    train(run, 1)
    run.export_weights(tmp_path / "new" / "weights.safetensors")
    plain.load_state_dict(load_file(tmp_path / "new" / "weights.safetensors"))
    for name, weight in run.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["weights.safetensors"]


def save_after_three(folder: str) -> tuple[list[float], dict[str, dict[str, Tensor]]]:
    """On each of four processes: trains, saves after three steps and goes on."""
    torch.set_num_threads(1)
    run = program()
    losses = [step.loss for step in train(run, 3)]
    run.save(folder, batches=batches(), keep=1)
    again = program(own=model(seed=1))
    again.load(folder, batches=batches())
    losses += [step.loss for step in train(run, 5)]
    assert [step.loss for step in train(again, 5)] == losses[3:], "the same ranks: the same to the bit"
    return losses, state_of(run)


@pytest.mark.long
@pytest.mark.gloo
def test_saved_by_four_processes_resumed_on_simulated_ranks(gloo: GlooPool, unbroken: Unbroken, tmp_path: Path) -> None:
    results = gloo.run(save_after_three, str(tmp_path), timeout_s=120.0)
    assert all(losses == results[0][0] for losses, _ in results)
    assert {path.name for path in (tmp_path / "step-000003").glob("*.distcp")} == {
        f"__{rank}_0.distcp" for rank in range(4)
    }
    resumed = program(OTHERS["3 ranks"], model(seed=1))
    resumed.load(tmp_path, batches=batches())
    assert_same_steps(train(resumed, 5), unbroken.steps[3:5])
    assert_same_state(state_of(resumed), results[0][1])


def load_here(folder: str) -> list[float]:
    torch.set_num_threads(1)
    run = program(own=model(seed=1))
    run.load(Path(folder) / "step-000003", batches=batches())
    return [step.loss for step in train(run, 6)]


@pytest.mark.gloo
def test_saved_by_simulated_ranks_resumed_by_four_processes(gloo: GlooPool, unbroken: Unbroken) -> None:
    for losses in gloo.run(load_here, str(unbroken.folder), timeout_s=120.0):
        assert losses == pytest.approx([step.loss for step in unbroken.steps[3:6]], rel=1e-10, abs=0)


def save_on_rank_0_alone(folder: str) -> None:
    torch.set_num_threads(1)
    run = program(TP1X2, timeout_s=100.0)
    if run.is_main:
        run.save(folder)
    run.step(next(iter(batches())))


@pytest.mark.gloo
@pytest.mark.case(116)
def test_a_save_on_one_rank_while_the_other_steps_ends_on_both(gloo: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed) as failed:
        gloo.run(save_on_rank_0_alone, str(tmp_path), num_ranks=2, timeout_s=90.0)
    assert (
        f"save to {tmp_path}/step-000000: rank 1 did not call it (rank 1 called step 1); it is collective: call it on "
        "every rank"
    ) in failed.value.texts[0]
    other = failed.value.texts[1]  # ended by its failure channel, unless its connection breaks before
    assert other == DEAD or "first failure: rank 0: RankFailed" in other
    assert not list(tmp_path.iterdir())


def save_where_rank_1_cannot_write(folder: str) -> None:
    torch.set_num_threads(1)
    run = program(TP1X2)
    run.save(folder)
    train(run, 1)
    if not run.is_main:
        import torch.distributed.checkpoint.filesystem as filesystem

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        filesystem.FileSystem.create_stream = full  # type: ignore[method-assign]
    run.save(folder)


@pytest.mark.gloo
def test_a_rank_that_cannot_write_ends_the_save_on_all(gloo: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed) as failed:
        gloo.run(save_where_rank_1_cannot_write, str(tmp_path), num_ranks=2)
    gloo.close()  # the workers' torch has been changed
    assert all("rank 1: OSError: [Errno 28] No space left on device" in text for text in failed.value.texts.values())
    assert len(failed.value.texts) == 2
    run = program(TP1X2)
    assert run.load(tmp_path) == tmp_path / "step-000000"
