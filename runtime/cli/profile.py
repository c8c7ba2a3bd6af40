"""`hgraph profile`: costs and memory of every scheme, from the compiled programs on this machine, as a profile file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hgraph.errors import InvalidInput
from runtime.cli.options import (
    check_folder,
    cluster_option,
    config_option,
    json_option,
    load_run_config,
    make_model,
    out,
    pool_option,
    print_json,
    settings_argument,
    shown_path,
    table,
    working,
)

if TYPE_CHECKING:
    from hgraph.profile import Profile
    from hgraph.profile_file import ProfileFile, SchemeProfile
    from hgraph.strategy import Pool, Scheme
    from passes.pipelines import CompiledScheme
    from runtime.config import RunConfig
    from runtime.failure_channel import FailureChannel
    from runtime.profiler import PeakReport
    from runtime.program import Program

__all__ = ["command"]

_HEADERS = (
    "scheme",
    "origin",
    "ms per 1,000^2",
    "ms per 1,000",
    "ms fixed",
    "most tokens",
    "held-out points",
    "median error",
    "worst error",
    "peak MiB: counted / predicted",
)


@dataclass(frozen=True, slots=True)
class _Request:
    """What the command was asked for; `arguments` start it again in each process."""

    config: RunConfig
    ranks: int | None
    lengths: tuple[int, ...]
    repeats: int
    fill: tuple[Scheme, ...]
    cluster: str | None
    out_path: str | None
    as_json: bool


@click.command("profile")
@config_option
@pool_option
@click.option("--ranks", type=click.IntRange(min=1), help="Instead of a pool: all (tp, pp) that divide so many ranks.")
@click.option(
    "--lengths", metavar="LIST", help="Tokens of the sequences, such as 64,256; default: calibration.lengths."
)
@click.option("--repeats", type=click.IntRange(min=1), help="Runs of each micro-batch; default: calibration.repeats.")
@click.option("--fill", metavar="SCHEMES", help="Add costs of schemes that are not measured, such as tp4.cp2,tp8.")
@cluster_option
@click.option("--nproc", type=click.IntRange(min=1), help="Measure over so many processes, not on simulated ranks.")
@click.option("--out", "out_path", metavar="P.yaml", help="Write the profile to this file.")
@json_option
@settings_argument
def command(
    config_path: str | None,
    pool_path: str | None,
    ranks: int | None,
    lengths: str | None,
    repeats: int | None,
    fill: str | None,
    cluster: str | None,
    nproc: int | None,
    out_path: str | None,
    as_json: bool,
    settings: tuple[str, ...],
) -> None:
    """Measure what every scheme costs on this machine, and how far the fit is off.

    Runs the compiled programs of every scheme of the pool at several lengths and packings, fits a, b and c
    (docs/profiles.md), and tells the error at points that the fit did not see. Nothing is trained. Without --nproc all
    ranks are simulated in this process, and times are its CPU time; with --nproc, or under torchrun, each rank is a
    process, and times are those of the clock. --fill adds schemes from floating-point operations and bytes, over the
    links of --cluster; they are marked analytic.

    \b
    Examples:
      hgraph profile --config examples/first_light/config.yaml --out profile.yaml
      hgraph profile --config examples/first_light/config.yaml --ranks 2 --lengths 32,64,128 --repeats 1
      hgraph profile --pool examples/first_light/strategies.yaml --fill tp2.cp2 --cluster 4-cpu --json
      hgraph profile --config examples/first_light/config.yaml --nproc 4 --out profile.yaml
    """
    from runtime.launch import is_launched, launch

    config = _config(config_path, pool_path, ranks, settings)
    request = _Request(
        config,
        ranks,
        _lengths(lengths, config),
        repeats or config.calibration.repeats,
        _fill(fill, cluster),
        cluster,
        out_path,
        as_json,
    )
    _check(request, nproc)
    if nproc is not None and not is_launched():
        options = {"config": config_path, "pool": pool_path, "ranks": ranks, "lengths": lengths, "repeats": repeats}
        options |= {"fill": fill, "cluster": cluster, "out": out_path}
        again = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
        sys.exit(launch(nproc, "runtime.cli", ["profile", *again, *(["--json"] if as_json else []), *settings]))
    with _job(config) as (channel, rank):
        profile, peaks, num_ranks = _measured(request, channel, rank)
        if rank == 0:
            _answer(request, profile, peaks, num_ranks)


def _config(config_path: str | None, pool_path: str | None, ranks: int | None, settings: Sequence[str]) -> RunConfig:
    if ranks is not None and pool_path is not None:
        raise InvalidInput("expected --pool FILE or --ranks N, got both; --ranks makes a pool of its own")
    if ranks is not None and config_path is None:
        pool_path = os.devnull  # no pool is read
    return load_run_config(config_path, pool_path, settings)


def _lengths(text: str | None, config: RunConfig) -> tuple[int, ...]:
    if text is None:
        return config.calibration.lengths
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or int(part) < 1]
    if wrong or len(set(parts)) < 3:
        got = f"got {wrong[0]!r}" if wrong else f"got {text!r}"
        raise InvalidInput(f"--lengths: expected three or more distinct lengths of 1 token or more, {got}")
    return tuple(sorted({int(part) for part in parts}))


def _fill(text: str | None, cluster: str | None) -> tuple[Scheme, ...]:
    from hgraph.scheme_text import parse_scheme

    if (text is None) != (cluster is None):
        raise InvalidInput("expected --fill SCHEMES and --cluster NAME together: what moves depends on the links")
    return () if text is None else tuple(parse_scheme(part.strip()) for part in text.split(","))


def _check(request: _Request, nproc: int | None) -> None:
    """Raises what is wrong before any work begins."""
    from hgraph.strategy_file import load_pool

    if request.out_path is not None:
        check_folder(Path(request.out_path).parent)
    if request.cluster is not None:
        from hgraph.topology_file import load_topology

        load_topology(request.cluster)
    num_ranks = request.ranks
    if num_ranks is None:
        num_ranks = load_pool(shown_path(request.config.pool), trainable=True).num_ranks
    if nproc is not None and nproc != num_ranks:
        raise InvalidInput(
            f"--nproc: expected {num_ranks} processes, as many as the pool has ranks, got {nproc}; leave it out to "
            "simulate the ranks"
        )


@contextmanager
def _job(config: RunConfig) -> Iterator[tuple[FailureChannel | None, int]]:
    """Frames a rank of a job of processes; yields its channel (None for simulated ranks) and its number."""
    from runtime.launch import is_launched

    if not is_launched():
        yield None, 0
        return
    import torch.distributed as dist

    from runtime.failure_channel import FailureChannel, rank_guard
    from runtime.process_groups import init_process_group_from_env

    rank, _ = init_process_group_from_env("gloo", config.timeout_s)
    channel = FailureChannel.on_default_store()
    with rank_guard(channel):
        yield channel, rank
        dist.destroy_process_group()


def _measured(
    request: _Request, channel: FailureChannel | None, rank: int
) -> tuple[ProfileFile, dict[str, PeakReport], int]:
    """Returns the profile, what was counted of memory by scheme, and the number of ranks. Collective under torchrun."""
    with working("compiling the pool"):
        import torch

        from runtime.cluster import SimulatedCluster, choose_cluster
        from runtime.measure import Sampling
        from runtime.models.build import loss_of
        from runtime.profiler import profile_program
        from runtime.program import compile

        torch.set_num_threads(1)
        config, pool = request.config, _pool(request)
        simulated = SimulatedCluster(pool.num_ranks) if channel is None else None
        cluster = simulated or choose_cluster(pool.num_ranks, config.timeout_s, channel)
        model = make_model(config, on_meta=True)
    found: list[tuple[ProfileFile, dict[str, PeakReport]]] = []

    def profile(program: Program) -> Profile:
        sampling = Sampling(request.lengths, request.repeats, held_out=True)
        with _bar(quiet=request.as_json or rank > 0) as begin:
            found.append(profile_program(program, config, sampling, begin=begin))
        return found[0][0].profile(pool.num_ranks)

    options: dict[str, Any] = {"cluster": cluster, "channel": channel, "timeout_s": config.timeout_s}
    with compile(model, loss_of(model), pool, profile=profile, depth=0, **options) as program:
        ((profile_file, peaks),) = found
        return _filled(request, profile_file, program), peaks, pool.num_ranks


def _pool(request: _Request) -> Pool:
    """The pool of the configuration, or that of all schemes for a number of ranks, checked against the model."""
    from runtime.cli.options import captured_model, read_pool
    from runtime.facts import model_facts
    from runtime.profiler import pool_of_all_schemes

    _, captured = captured_model(request.config)
    facts = model_facts(captured)
    return read_pool(request.config, facts) if request.ranks is None else pool_of_all_schemes(request.ranks, facts)


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[int], Callable[[], object]]]:
    """Yields what makes a progress bar of so many runs on a terminal."""
    from tqdm import tqdm

    bar = tqdm(desc="measuring", unit="run", leave=False, disable=quiet or not sys.stderr.isatty())

    def begin(total: int) -> Callable[[], object]:
        bar.reset(total)
        return bar.update

    try:
        yield begin
    finally:
        bar.close()


def _filled(request: _Request, profile: ProfileFile, program: Program) -> ProfileFile:
    """Adds what was not measured: from the programs of a scheme, or, where it cannot be compiled, from the sizes."""
    if not request.fill or request.cluster is None:
        return profile
    from hgraph.analytic_cost import with_analytic
    from hgraph.topology_file import load_topology
    from passes.pipelines import compile_scheme
    from runtime.facts import leaf_template
    from runtime.program_cost import work_of_programs

    topology = load_topology(request.cluster)
    template = leaf_template(program.pool, program.model)

    def compiled(scheme: Scheme) -> CompiledScheme:
        return program.compiled.get(str(scheme)) or compile_scheme(program.captured, scheme, template)

    work = work_of_programs(compiled, program.captured, program.pool.num_ranks, topology)
    plain = [scheme for scheme in request.fill if all(stage.cp == 1 for stage in scheme.stages)]
    profile = with_analytic(profile, plain, topology, work=work)
    return with_analytic(profile, [scheme for scheme in request.fill if scheme not in plain], topology)


def _answer(request: _Request, profile: ProfileFile, peaks: Mapping[str, PeakReport], num_ranks: int) -> None:
    if request.out_path is not None:
        from hgraph.profile_file import write_profile_file

        write_profile_file(request.out_path, profile)
    if request.as_json:
        print_json(_as_data(profile, peaks, num_ranks))
        return
    rows = [
        _row(name, own, profile.max_tokens(name, num_ranks), peaks.get(name)) for name, own in profile.schemes.items()
    ]
    out().print(table("Schemes", _HEADERS, rows, numbers=tuple(range(2, 10))))
    bridges = ", ".join(f"{name} {ms:,.1f}" for name, ms in profile.bridge_ms.items())
    click.echo(f"bridges, ms: {bridges}")
    click.echo(profile.source + ("" if request.out_path is None else f"; written to {request.out_path}"))


def _row(name: str, own: SchemeProfile, limit: int, peak: PeakReport | None) -> list[str]:
    fit = own.fit
    return [
        name,
        own.origin,
        f"{own.a * 1e6:,.3f}",
        f"{own.b * 1e3:,.2f}",
        f"{own.c:,.2f}",
        f"{limit:,}",
        "-" if fit is None else str(fit.points),
        "-" if fit is None else f"{fit.median:.1%}",
        "-" if fit is None else f"{fit.worst:.1%}",
        "-" if peak is None else f"{peak.counted_bytes / 2**20:,.1f} / {peak.predicted_bytes / 2**20:,.1f}",
    ]


def _as_data(profile: ProfileFile, peaks: Mapping[str, PeakReport], num_ranks: int) -> dict[str, Any]:
    schemes = {}
    for name, own in profile.schemes.items():
        schemes[name] = {
            **{key: value for key, value in asdict(own).items() if key not in ("memory", "max_tokens")},
            "max_tokens": profile.max_tokens(name, num_ranks),
            "memory": [asdict(stage) for stage in own.memory],
            "peak": None if name not in peaks else asdict(peaks[name]),
        }
    return {"ranks": num_ranks, "schemes": schemes, "bridge_ms": dict(profile.bridge_ms), "source": profile.source}
