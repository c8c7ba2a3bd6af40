"""The training loop of `hgraph train`: corpus, program, steps, metrics, summary."""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hgraph.capture import LossFunction
from hgraph.data.batches import GlobalBatch, GlobalBatches, global_batches
from hgraph.errors import HydraulisError, RankFailed
from hgraph.plan import SequencedPlan, StepPlan
from hgraph.profile import Profile
from hgraph.topology import Topology
from hgraph.topology_file import load_topology, topology_from_environment
from runtime.calibrate import MemoryLimits, calibrate
from runtime.checkpoint.resume import start_of
from runtime.config import RunConfig
from runtime.corpus.build import build_dataset
from runtime.corpus.entropy import unigram_entropy
from runtime.failure_channel import FailureChannel, rank_guard
from runtime.models.build import build_model, loss_of
from runtime.process_groups import init_process_group_from_env
from runtime.program import Program, compile
from runtime.recorder import Recorder
from runtime.saved_plans import SavedPlans, read_plans
from runtime.step_output import StepOutput
from runtime.summary import StaticComparison, Summary, print_summary, write_summary

__all__ = ["train"]

_COMPARED_BATCHES = 3
_MIB = 2**20


def train(config: RunConfig, resume: Path | None = None, replay: Path | None = None) -> None:
    """Trains as `config` says, on this rank of the job that torchrun started (or alone, on simulated ranks).

    `resume` is a checkpoint, or a folder of some, to go on after; it may come from any pool and number of ranks.
    `replay` is a file of plans that an earlier run left: nothing is planned then.
    """
    torch.set_num_threads(1)
    plans = None if replay is None else read_plans(replay)
    if config.num_processes == 1:
        _train(config, 0, None, resume, plans)
        return
    rank, _ = init_process_group_from_env("gloo", config.timeout_s)
    channel = FailureChannel.on_default_store()
    try:
        with rank_guard(channel):
            _train(config, rank, channel, resume, plans)
            dist.destroy_process_group()
    except RankFailed:
        raise
    except HydraulisError:
        # All ranks raise the same: the first to fail tells.
        failure = channel.first_failure()
        if failure is not None and failure.rank != rank:
            raise SystemExit(1) from None
        raise


def _train(
    config: RunConfig, rank: int, channel: FailureChannel | None, resume: Path | None, plans: SavedPlans | None
) -> None:
    start = start_of(config, resume)
    with Recorder(config, is_writer=rank == 0, steps_done=start.steps_done) as recorder:
        say = recorder.say
        dataset, _, report = build_dataset(config.data, progress=rank == 0 and sys.stderr.isatty())
        say(str(report))
        base_mib = _peak_mib()
        torch.manual_seed(config.seed)
        model = build_model(config.model).to(getattr(torch, config.dtype))
        say(f"model: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
        batches = global_batches(
            dataset, tokens_per_step=config.tokens_per_step, seed=config.seed, max_steps=config.steps
        )
        with _compiled(config, model, loss_of(model), channel, say) as program:
            if start.checkpoint is not None:
                say(f"resumed from {program.load(start.checkpoint, batches=batches)}")
                batches.start = program.next_batch
            recorder.start(program)
            steps = []
            for batch, output in _steps(program, batches, plans):
                steps.append(recorder.step(output, batch.lengths))
                if _is_due(config, program.step_count):
                    _save(program, config, batches)
            program.wait_for_save()
            recorder.stop()
            comparison = _compare(program, list(itertools.islice(batches, len(steps))), steps, say)
            peak_mib, base_mib = max(program.cluster.gather((_peak_mib(), base_mib)))
        if rank == 0:
            entropy = unigram_entropy(dataset)
            summary = Summary(tuple(steps), entropy, peak_mib, base_mib, comparison, config.folder)
            print_summary(summary)
            write_summary(summary)


def _steps(
    program: Program, batches: GlobalBatches, plans: SavedPlans | None
) -> Iterator[tuple[GlobalBatch, StepOutput]]:
    """Trains on the batches, planned ahead or as `plans` says."""
    if plans is None:
        for batch in program.ahead(batches):
            yield batch, program.step(batch)
        return
    plans.check_pool(program.pool)
    for batch in batches:
        plan = plans.plan(program.step_count + 1, batch, program.pool, program.profile)
        yield batch, program.run_plan(batch, plan)


def _save(program: Program, config: RunConfig, batches: GlobalBatches) -> None:
    settings = config.checkpoint
    program.save(config.checkpoints, batches=batches, keep=settings.keep, background=settings.background)


def _is_due(config: RunConfig, step_count: int) -> bool:
    every = config.checkpoint.every
    return every is not None and (step_count % every == 0 or step_count == config.steps)


def _peak_mib() -> float:
    """Greatest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MIB


def _compiled(
    config: RunConfig, model: nn.Module, loss: LossFunction, channel: FailureChannel | None, say: Callable[[str], None]
) -> Program:
    start_s = time.perf_counter()
    limits = MemoryLimits(config.memory.budget_mib, config.memory.max_tokens)
    settings = config.calibration
    longest = config.data.max_length
    lengths = [length if longest is None else min(length, longest) for length in settings.lengths]

    def profile(program: Program) -> Profile:
        say(f"compiled {program.compiled_graphs} graphs in {time.perf_counter() - start_s:.1f} s")
        return calibrate(program, limits, lengths=lengths, repeats=settings.repeats, cache=settings.cache, progress=say)

    program = compile(
        model,
        loss,
        config.pool,
        optimizer=config.optimizer.adamw(config.steps),
        seed=config.seed,
        profile=profile,
        planner=config.planner.options(),
        depth=config.planner.ahead(),
        bucket_mb=config.bridges.bucket_mb,
        topology=_topology(config),
        timeout_s=config.timeout_s,
        channel=channel,
    )
    say(f"ready after {time.perf_counter() - start_s:.1f} s")
    return program


def _topology(config: RunConfig) -> Topology | None:
    """The cluster of the job: nodes as torchrun says, links as configured. On simulated ranks, the configured one."""
    cluster = config.bridges.cluster
    if config.num_processes > 1:
        return topology_from_environment(cluster=cluster)
    return None if cluster is None else load_topology(cluster)


def _compare(
    program: Program, batches: list[GlobalBatch], steps: list[StepOutput], say: Callable[[str], None]
) -> StaticComparison | None:
    """Times a few batches again, under their own plan and under every strategy that can run all batches.

    A plan that is both is timed once.
    """
    chosen = [index for index in _spread(len(batches), _COMPARED_BATCHES) if batches[index].num_targets]
    longest = max(max(batch.lengths) for batch in batches)
    static = program.strategies_for(longest)
    if not static or not chosen:
        return None
    say(f"timing {len(chosen)} batches again under their own plans and under {', '.join(static)}")
    own: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in static}
    for index in chosen:
        batch, plan = batches[index], steps[index].plan
        own.append(program.measure(batch, plan))
        for name in static:
            other = program.planning.plan_under(steps[index].step, name, batch.lengths).plan
            times[name].append(own[-1] if _what_runs(other) == _what_runs(plan) else program.measure(batch, other))
    best = min(static, key=lambda name: statistics.fmean(times[name]))
    return StaticComparison(tuple(chosen), tuple(own), best, tuple(times[best]))


def _what_runs(plan: StepPlan | SequencedPlan) -> tuple[object, ...]:
    return plan.strategy, *(replica.micro_batches for replica in plan.replicas)


def _spread(count: int, wanted: int) -> list[int]:
    """`wanted` indices spread evenly over `count`."""
    wanted = min(wanted, count)
    return sorted({(2 * number + 1) * count // (2 * wanted) for number in range(wanted)})
