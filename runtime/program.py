"""Program: a model, a loss and a pool compiled together; `step` trains on one global batch.

    program = compile(model, loss, pool, optimizer=AdamW(lr=3e-4))
    for batch in program.ahead(batches):
        out = program.step(batch)

Numbers (design: one denominator for the whole step): the loss is the sum over all labelled tokens of the global batch
over their number, whatever the strategy; every gradient is that of this loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hgraph.capture import Captured, LossFunction, capture
from hgraph.check_plan import check_plan, check_sequenced_plan
from hgraph.data.batches import BatchState, GlobalBatch, GlobalBatches, make_batch
from hgraph.errors import RankFailed
from hgraph.plan import SequencedPlan, StepPlan
from hgraph.profile import Profile
from hgraph.shard_map import relative
from hgraph.strategy import Pool, check_compilable
from hgraph.strategy_file import load_pool
from hgraph.topology import Topology
from passes.pipelines import CompiledScheme, compile_scheme, normalized
from runtime.bridge_planner import BridgePlanner
from runtime.buffer_pool import BufferPool
from runtime.calibrate import MemoryLimits, calibrate
from runtime.checkpoint.background import BackgroundWrite
from runtime.cluster import Cluster, choose_cluster
from runtime.direct_switch import DirectSwitch
from runtime.executor import RankExecutor
from runtime.facts import check_same_everywhere, compute_dtype, leaf_template, model_facts, trained_names
from runtime.failure_channel import FailureChannel
from runtime.layouts import owned_box
from runtime.lookups import check_lengths, longest_sequence, vocabulary
from runtime.meeting import meet
from runtime.micro_batches import contents_of
from runtime.optimizer import AdamW, ShardedAdamW
from runtime.planning import Planning
from runtime.rank_step import Executable, RankOutcome, RankState, StepFacts, rank_step
from runtime.step_output import StepOutput
from runtime.weights import gather, initial_value, write_back
from strategies.ahead import PlanAhead, PlanTimes
from strategies.options import PlannerOptions

__all__ = ["Program", "compile"]


def compile(
    model: nn.Module,
    loss: LossFunction,
    pool: Pool | str | Path,
    *,
    optimizer: AdamW | None = None,
    seed: int = 0,
    profile: Profile | Callable[[Program], Profile] | None = None,
    limits: MemoryLimits | None = None,
    planner: PlannerOptions | None = None,
    depth: int | PlanAhead = 2,
    bucket_mb: float = 25.0,
    topology: Topology | None = None,
    fields: Mapping[str, Tensor] | None = None,
    exact: bool = False,
    cluster: Cluster | None = None,
    timeout_s: float = 300.0,
    channel: FailureChannel | None = None,
    dump: Callable[[str, str, str], None] | None = None,
) -> Program:
    """Returns the program that trains `model` by `loss(model, packed)`, the sum over labelled tokens. Collective.

    - `pool`: a `Pool`, or the path of a strategy file.
    - `profile`: costs and token limits per scheme, or a function that makes them; without it they are measured on this
      machine (`calibrate`), within `limits`.
    - `seed`: initialises parameters that are on the meta device; weights that are there are kept.
    - `fields`: one example (24 tokens or 3 sequences) of each further field that the loss reads from `packed.fields`;
      the data set gives those of each sequence (`fields(i)`, see `hgraph/data/dataset.py`).
    - `depth`: how many steps `Program.ahead` plans before they are needed (`PlanAhead` says more); 0 plans in step.
    - `bucket_mb`: parameters and gradients travel in buckets of up to so many megabytes (10^6 bytes) a rank, two of
      which are on their way at a time (`runtime/bridge.py`).
    - `topology`: nodes and links of the cluster, by which senders and relays of the bridges are chosen; without it all
      links are taken to be equal.
    - `exact`: everything in float64, also where the model casts to float32 (for comparison with the plain model).
    - `dump`: called with scheme, pass and text after every pass.

    Everything is compiled here; no step compiles anything.
    """
    # What is wrong with the pool alone is told before the model is traced.
    for scheme in (pool if isinstance(pool, Pool) else load_pool(pool, trainable=True)).schemes:
        check_compilable(scheme)
    captured = normalized(capture(model, loss, fields=fields), exact=exact)
    pool = pool if isinstance(pool, Pool) else load_pool(pool, model=model_facts(captured), trainable=True)
    cluster = cluster or choose_cluster(pool.num_ranks, timeout_s, channel)
    compiled = {
        str(scheme): compile_scheme(
            captured, scheme, leaf_template(pool, model), dump=None if dump is None else _named(dump, str(scheme))
        )
        for scheme in pool.schemes
    }
    program = Program(
        model, captured, compiled, pool, optimizer or AdamW(), cluster, seed, bucket_mb=bucket_mb, topology=topology
    )
    if callable(profile):
        profile = profile(program)
    elif profile is None:
        profile = calibrate(program, limits or MemoryLimits())
    program.planning = Planning(pool, profile, planner or PlannerOptions(), depth, cluster)
    return program


def _named(dump: Callable[[str, str, str], None], scheme: str) -> Callable[[str, str], None]:
    return lambda name, text: dump(scheme, name, text)


class Program:
    """A compiled program; see `compile`. Two programs in one process do not see each other."""

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        compiled: Mapping[str, CompiledScheme],
        pool: Pool,
        optimizer: AdamW,
        cluster: Cluster,
        seed: int,
        *,
        bucket_mb: float = 25.0,
        topology: Topology | None = None,
    ) -> None:
        self.model, self.captured, self.compiled, self.pool = model, captured, compiled, pool
        self.optimizer, self.cluster, self.seed = optimizer, cluster, seed
        self._planning: Planning | None = None
        self.contents = contents_of(captured)
        self.vocab_size = vocabulary(self.contents.lookups)
        self.longest_sequence = longest_sequence(self.contents.lookups)
        self.dtype = compute_dtype(captured)
        self.master_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.bucket_mb, self.topology = bucket_mb, topology
        dtypes = self.dtype, self.master_dtype
        self._bridges = BridgePlanner(compiled, captured, pool.num_ranks, dtypes, bucket_mb, topology)
        self.step_count = 0
        self.next_batch = BatchState()
        self.background = BackgroundWrite()
        check_same_everywhere(cluster, captured, pool, optimizer, model, seed, f"{topology} {bucket_mb}")
        cluster.prepare(self._groups())
        self.ranks = {rank: self._rank_state(rank) for rank in cluster.local_ranks}

    @property
    def compiled_graphs(self) -> int:
        """Number of programs compiled so far."""
        return sum(scheme.num_programs for scheme in self.compiled.values())

    @property
    def is_main(self) -> bool:
        """Whether this process holds rank 0: the one that should print."""
        return 0 in self.cluster.local_ranks

    def step(
        self,
        batch: GlobalBatch | Sequence[Sequence[int] | Tensor],
        *,
        parts: Sequence[tuple[str, Sequence[int]]] | None = None,
    ) -> StepOutput:
        """Trains on one global batch and returns what happened. The same batch on every rank. Collective.

        The strategy is chosen by the planner. With `parts`, pairs of a strategy's name and the positions in the batch
        of the sequences it runs, several take turns: between two, parameters and accumulated gradients go directly from
        layout to layout (`runtime/direct_switch.py`). The numbers are the same.

        Raises `InvalidInput` for a batch that cannot be run and `NonFiniteLoss`; state is then as before.
        """
        self.cluster.enter(f"step {self.step_count + 1}")
        batch = batch if isinstance(batch, GlobalBatch) else make_batch(batch)
        check_lengths(batch.ids, batch.lengths, self.contents.lookups)
        if parts is not None:
            return self._update(batch, *self.planning.plan_parts(batch, self.step_count + 1, parts))
        return self._update(batch, *self.planning.plan(batch, self.step_count + 1))

    def run_plan(self, batch: GlobalBatch, plan: StepPlan | SequencedPlan) -> StepOutput:
        """Trains on a batch by a given plan. Collective."""
        self.cluster.enter(f"step {self.step_count + 1}")
        return self._update(batch, plan, None)

    def _update(self, batch: GlobalBatch, plan: StepPlan | SequencedPlan, times: PlanTimes | None) -> StepOutput:
        outcome = self._run(batch, plan, update=True)
        self.step_count += 1
        self.next_batch = batch.next_state
        return StepOutput(
            step=self.step_count,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            tokens=batch.num_tokens,
            labelled_tokens=batch.num_targets,
            strategy=plan.strategy,
            plan=plan,
            learning_rate=outcome.learning_rate,
            measured_ms=outcome.measured_ms,
            replica_ms=outcome.replica_ms,
            plan_times=times,
            bridge_bytes=self._bytes_moved(plan) if batch.num_targets else 0,
            compiled_graphs=self.compiled_graphs,
            peak_live_micro_batches=outcome.peak_live_micro_batches,
            idle_ranks=plan.idle_ranks(self.pool),
        )

    def measure(self, batch: GlobalBatch, plan: StepPlan | SequencedPlan) -> float:
        """Returns the milliseconds of a step that leaves weights and optimizer as they are. Collective."""
        self.cluster.enter("measure")
        return self._run(batch, plan, update=False).measured_ms

    def _run(self, batch: GlobalBatch, plan: StepPlan | SequencedPlan, *, update: bool) -> RankOutcome:
        self.check(plan, batch.lengths)
        check_lengths(batch.ids, batch.lengths, self.contents.lookups)
        facts = self.step_facts(batch, plan)
        generators = {rank: rank_step(state, facts, update=update) for rank, state in self.ranks.items()}
        with torch.no_grad():
            return next(iter(self.cluster.run(generators).values()))

    def check(self, plan: StepPlan | SequencedPlan, lengths: Sequence[int]) -> None:
        """Raises `PlanError` unless the plan is sound for sequences of `lengths`."""
        if isinstance(plan, SequencedPlan):
            check_sequenced_plan(plan, self.pool, self.profile, lengths)
        else:
            check_plan(plan, self.pool, self.profile, lengths)

    def step_facts(self, batch: GlobalBatch, plan: StepPlan | SequencedPlan) -> StepFacts:
        """Returns what all ranks know of a step that is to run; direct switches that are new in it get planned."""
        names = [part.strategy for part in plan.parts]
        for pair in itertools.pairwise(names):
            self._prepare_switch(pair)
        return StepFacts(self.step_count + 1, batch, plan.parts, tuple(self.pool[name] for name in names))

    def _prepare_switch(self, pair: tuple[str, str]) -> None:
        for rank, state in self.ranks.items():
            if pair not in state.switches:
                plans = self._bridges.switch(self.pool[pair[0]], self.pool[pair[1]])
                bridges = self._bridges.on_rank(plans, rank, self.cluster.device, state.buffers)
                state.switches[pair] = DirectSwitch(bridges)

    def _bytes_moved(self, plan: StepPlan | SequencedPlan) -> int:
        state = next(iter(self.ranks.values()))
        names = [part.strategy for part in plan.parts]
        into, out = state.executables[names[0]].bridges.parameters, state.executables[names[-1]].bridges.gradients
        between = [state.switches[pair].total_bytes for pair in itertools.pairwise(names)]
        return into.total_bytes + out.total_bytes + sum(between)

    def ahead(self, batches: Iterable[GlobalBatch]) -> Iterator[GlobalBatch]:
        """Yields the batches, and has the next ones planned in the meantime."""
        return self.planning.ahead(batches, lambda: self.step_count)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns all weights, whole, by every name of the model. Collective."""
        meet(self.cluster, "state_dict")
        whole = gather(self, {rank: state.weights() for rank, state in self.ranks.items()})
        return {name: whole[facts.name] for facts in self.captured.parameters for name in facts.names}

    def update_model(self) -> None:
        """Copies the trained weights into the user's module. Collective."""
        write_back(self.model, self.state_dict())

    def save(
        self,
        folder: str | Path,
        *,
        batches: GlobalBatches | None = None,
        keep: int | None = None,
        background: bool = False,
    ) -> Path:
        """Writes the state as `folder`/step-NNNNNN and returns that path. Collective; all nodes share `folder`.

        A checkpoint is complete or not there. `batches` lets `load` check that the data are the same; `keep` removes
        all but so many of the last checkpoints, once this one is complete. With `background` the state is copied, and
        written while training goes on; the next save, `load`, `wait_for_save` and `close` wait for it, and raise
        `RankFailed` if it failed. See `docs/checkpoints.md`.
        """
        from runtime.checkpoint import run  # takes long to import

        return run.save(self, Path(folder), batches, keep, background=background)

    def wait_for_save(self) -> None:
        """Returns once the last save in the background is complete; raises `RankFailed` if it failed. Collective."""
        from runtime.checkpoint import run

        run.wait_for_save(self)

    def load(self, folder: str | Path, *, batches: GlobalBatches | None = None) -> Path:
        """Reads a checkpoint, or the last complete one in `folder`, saved under any pool; returns its path. Collective.

        Go on with `batches.start = program.next_batch`. Raises `InvalidInput` where the model is another one or, with
        `batches`, the data are; the state is then as before.
        """
        from runtime.checkpoint import run

        return run.load(self, Path(folder), batches)

    def export_weights(self, path: str | Path) -> None:
        """Writes all weights, whole, by every name of the model, as one safetensors file. Collective."""
        from runtime.checkpoint import run

        run.export_weights(self, Path(path))

    def close(self, error: BaseException | None = None) -> None:
        """Ends the planner's process, and tells the other ranks that this one has finished, or failed with `error`.

        Waits for a save in the background; raises `RankFailed` if it failed, or notes that on `error`.
        """
        if self._planning is not None:
            self._planning.close()
        if error is not None and self.background.is_pending:
            self.cluster.report(error)  # before the wait: others may wait for this rank
        fault = self.background.finish()
        self.cluster.close(error)
        if fault and error is None:
            raise RankFailed(fault)
        if fault and error is not None:
            error.add_note(fault)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    @property
    def planning(self) -> Planning:
        assert self._planning is not None, "set once costs are known"
        return self._planning

    @planning.setter
    def planning(self, planning: Planning) -> None:
        self._planning = planning

    @property
    def profile(self) -> Profile:
        """Costs and token limits of every scheme."""
        return self.planning.profile

    def strategies_for(self, length: int) -> list[str]:
        """Returns the names of the strategies that can run a sequence of `length` tokens."""
        if self.longest_sequence is not None and length > self.longest_sequence:
            return []
        return [
            strategy.name
            for strategy in self.pool.strategies
            if any(self.profile.cost(replica.scheme).max_tokens >= length for replica in strategy.replicas)
        ]

    def _groups(self) -> list[tuple[int, ...]]:
        """Every device group that a collective of any program may use."""
        groups: set[tuple[int, ...]] = {tuple(range(self.pool.num_ranks))}
        for strategy in self.pool.strategies:
            for replica in strategy.replicas:
                compiled = self.compiled[str(replica.scheme)]
                for group in compiled.groups():
                    groups.add(tuple(replica.ranks[rank] for rank in group))
        return sorted(groups)

    def _rank_state(self, rank: int) -> RankState:
        owned: dict[str, Tensor] = {}
        frozen: dict[str, Tensor] = {}
        named = dict(self.model.named_parameters())
        trained = trained_names(self.captured)
        for facts in self.captured.parameters:
            box = owned_box(facts.shape, self.pool.num_ranks, rank)
            if box is None:
                continue
            whole = initial_value(named[facts.name], facts, self.seed)
            part = whole[relative(box, tuple((0, size) for size in facts.shape))]
            part = part.detach().to(self.cluster.device, self.master_dtype, copy=True)
            (owned if facts.name in trained else frozen)[facts.name] = part
        optimizer = ShardedAdamW(self.optimizer, owned)
        state = RankState(rank, self.pool.num_ranks, self.dtype, optimizer, frozen, self.captured, self.contents)
        state.buffers = BufferPool(self.cluster.device)
        for strategy in self.pool.strategies:
            state.executables[strategy.name] = self._executable(strategy.name, rank, state.buffers)
        return state

    def _executable(self, name: str, rank: int, pool: BufferPool) -> Executable:
        strategy = self.pool[name]
        bridges = self._bridges.on_rank(self._bridges.plans(strategy), rank, self.cluster.device, pool)
        index = strategy.replica_of(rank)
        executor = None
        if index is not None:
            replica = strategy.replicas[index]
            compiled = self.compiled[str(replica.scheme)]
            buffers = {key: tensor.to(self.cluster.device) for key, tensor in self._buffers.items()}
            executor = RankExecutor(compiled, replica, rank, buffers, self.master_dtype)
        return Executable(strategy, index, executor, bridges)

    @property
    def _buffers(self) -> Mapping[str, Tensor]:
        if self.dtype != torch.float64:
            return self.captured.buffers
        return {
            name: tensor.double() if tensor.dtype == torch.float32 else tensor
            for name, tensor in self.captured.buffers.items()
        }
