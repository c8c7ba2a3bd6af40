"""`hgraph propose`: a pool of strategies for a cluster, from costs and sequence lengths."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hgraph.errors import InvalidInput
from hgraph.profile_file import ProfileFile, read_profile_file
from hgraph.strategy_file import write_pool
from hgraph.topology import Node, Topology, uniform
from hgraph.topology_file import ASSUMED_LOCAL, ASSUMED_NETWORK
from runtime.cli.options import check_folder, json_option, load_cluster, out, print_json, table

if TYPE_CHECKING:
    from hgraph.step_parts import Communication, StepClock
    from strategies.length_data import AboveLongest, LengthData
    from strategies.proposal import Proposal, ProposalOptions
    from strategies.propose import Progress
    from strategies.scheme_table import SchemeTable

__all__ = ["command"]

INTERRUPTED = 130

_AS_ASKED = ("tokens", "seed", "method", "length_step", "with_cp", "across_nodes", "communication")


@dataclass(frozen=True, slots=True)
class _Request:
    """What the command line asks for, read and checked."""

    profile: str
    lengths: str
    topology: Topology
    costs: ProfileFile
    data: LengthData
    longest: int
    options: ProposalOptions
    tokens: int
    num_batches: int
    seed: int
    method: str
    length_step: int
    with_cp: bool
    across_nodes: bool
    communication: Communication


@click.command(name="propose")
@click.option("--profile", metavar="NAME|FILE", required=True, help="Costs: a profile (docs/profiles.md).")
@click.option("--lengths", metavar="NAME|FILE", required=True, help="Lengths: web-docs, or a JSON file.")
@click.option("--tokens", type=int, required=True, help="Tokens of a step.")
@click.option("--cluster", metavar="NAME|FILE", help="Nodes: a cluster file, or a name such as 8x8-a800.")
@click.option("--ranks", type=int, help="So many ranks, in nodes like the cluster's, or without one the profile's.")
@click.option("--longest", type=int, help="Cut longer sequences to so many tokens. Default: the longest there is.")
@click.option("--out", "out_path", metavar="POOL.yaml", required=True, help="Where the pool is written.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option("--size", type=int, help="Strategies in the pool. Default: as many as --gain justifies.")
@click.option("--gain", type=float, default=0.001, show_default=True, help="Share of the time one more has to save.")
@click.option("--most", type=int, default=8, show_default=True, help="Strategies at most, without --size.")
@click.option(
    "--batches", "num_batches", type=int, help="Sampled batches. Default: 128, fewer of large ones, 16 at least."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampled batches.")
@click.option(
    "--method",
    type=click.Choice(["search", "published"]),
    default="search",
    show_default=True,
    help="published: one layout per class of longest sequence, as Hydraulis has it; a baseline.",
)
@click.option(
    "--length-step", type=int, default=128, show_default=True, help="Classes of --method published, in tokens."
)
@click.option("--with-cp", is_flag=True, help="Use context parallelism: such a pool can be planned, not trained yet.")
@click.option("--across-nodes", is_flag=True, help="Use stages wider than a node whose costs are only analytic, too.")
@click.option("--also", metavar="SCHEMES", help="Schemes nobody measured, with analytic costs: tp8.cp2,tp16.pp2.")
@click.option(
    "--communication",
    type=click.Choice(["none", "overlapped", "serial"]),
    default="none",
    show_default=True,
    help="Choose by times with messages and bridges, as hgraph simulate has them; bridges are counted by bytes.",
)
@json_option
def command(out_path: str, force: bool, as_json: bool, **asked: Any) -> None:
    """Propose a pool of strategies for a cluster, ready to train.

    Batches of --tokens are sampled from the lengths; layouts are searched for each, judged by the planner of training,
    and those are taken that make the mean step the shortest together (docs/proposal.md). Ctrl-C ends the search: the
    best pool so far is written, with exit status 130. The pool depends on the options alone.

    \b
    Examples:
      hgraph propose --profile llama-32b.a800-80gb --cluster 8x8-a800 --lengths web-docs --tokens 200000 \\
          --longest 32768 --out pool.yaml
      hgraph propose --profile llama-7b.a800-80gb --ranks 32 --lengths github-like --tokens 100000 \\
          --longest 32768 --size 4 --batches 16 --out small.yaml --force
      hgraph propose --profile llama-32b.a800-80gb --ranks 64 --lengths web-docs --tokens 200000 \\
          --longest 32768 --method published --batches 8 --out published.yaml --force --json
    """
    from strategies.length_data import above_longest

    request = _request(asked)
    _check_output(out_path, force)
    schemes, left_out = _scheme_table(request)
    proposal = _proposal(request, schemes)
    Path(out_path).write_text(_header(request, proposal) + write_pool(proposal.pool), encoding="utf-8")
    above = above_longest(request.data, request.longest)
    if as_json:
        print_json(_as_data(request, proposal, left_out, above, out_path))
    else:
        _show(request, proposal, left_out, above, out_path)
    if proposal.interrupted:
        click.echo(f"interrupted; the best pool so far is in {out_path}", err=True)
        raise SystemExit(INTERRUPTED)


def _request(asked: dict[str, Any]) -> _Request:
    """Returns what the options ask for, read and checked."""
    from strategies.length_data import read_lengths
    from strategies.proposal import ProposalOptions, usual_batches

    if asked["method"] == "published" and asked["size"] is not None:
        raise InvalidInput("--size: --method published takes every distinct layout it finds; leave --size out")
    for name, option in (("num_batches", "--batches"), ("tokens", "--tokens")):
        if asked[name] is not None and asked[name] < 1:
            raise InvalidInput(f"{option}: expected 1 or more, got {asked[name]}")
    costs, data = read_profile_file(asked["profile"]), read_lengths(asked["lengths"])
    topology = _topology(asked["cluster"], asked["ranks"], costs)
    if asked["communication"] != "none" and (asked["cluster"] is None or costs.model is None):
        lacks = (
            "give --cluster" if asked["cluster"] is None else f"{asked['profile']} has no `model`, whose sizes it needs"
        )
        raise InvalidInput(f"--communication {asked['communication']}: it depends on links and sizes; {lacks}")
    if asked["also"] is not None:
        costs = _with_analytic(costs, asked["also"], topology, asked["cluster"])
    longest = asked["longest"]
    return _Request(
        profile=os.path.basename(asked["profile"]),
        lengths=os.path.basename(asked["lengths"]),
        topology=topology,
        costs=costs,
        data=data,
        longest=longest if longest is not None else int(data.lengths.max()),
        options=ProposalOptions(size=asked["size"], gain=asked["gain"], most=asked["most"]),
        num_batches=asked["num_batches"] or usual_batches(asked["tokens"]),
        **{name: asked[name] for name in _AS_ASKED},
    )


def _with_analytic(costs: ProfileFile, also: str, topology: Topology, cluster: str | None) -> ProfileFile:
    from hgraph.analytic_cost import with_analytic

    if cluster is None:
        raise InvalidInput("--also: analytic costs depend on the links; give --cluster, too")
    return with_analytic(costs, [name.strip() for name in also.split(",")], topology)


def _topology(cluster: str | None, ranks: int | None, costs: ProfileFile) -> Topology:
    """Returns the cluster's nodes, so many like them, or so many as the profile's device has them."""
    if cluster is None and ranks is None:
        raise InvalidInput("expected the cluster: --cluster NAME|FILE, --ranks N, or both")
    if ranks is None:
        return load_cluster(str(cluster), 1)
    if ranks < 1:
        raise InvalidInput(f"--ranks: expected 1 or more, got {ranks}")
    per_node = min(ranks, costs.device.per_node) if costs.device is not None else ranks
    node = Node("node0", tuple(range(per_node)), ASSUMED_LOCAL, ASSUMED_NETWORK)
    if cluster is not None:
        node = _only_kind(load_cluster(cluster, 1), cluster)
    per_node = min(ranks, len(node.ranks))
    if ranks % per_node:
        raise InvalidInput(
            f"--ranks: expected a multiple of {per_node}, the ranks of a node, got {ranks}; describe other nodes in a "
            "cluster file and give --cluster alone"
        )
    shared = node.ranks_per_port if per_node % node.ranks_per_port == 0 else 1
    return uniform(
        f"{ranks // per_node} nodes of {per_node}", ranks // per_node, per_node, node.local, node.network,
        memory_gib=node.memory_gib, ranks_per_port=shared,
    )  # fmt: skip


def _only_kind(topology: Topology, name: str) -> Node:
    """Returns the one kind of node a cluster has."""
    kinds = {
        (len(node.ranks), node.local, node.network, node.memory_gib, node.ranks_per_port) for node in topology.nodes
    }
    if len(kinds) > 1:
        raise InvalidInput(
            f"--ranks: expected a cluster of equal nodes to take more of, got {len(kinds)} kinds in {name}"
        )
    return topology.nodes[0]


def _check_output(path: str, force: bool) -> None:
    check_folder(Path(path).parent)
    if os.path.exists(path) and not force:
        raise InvalidInput(f"--out {path}: expected a new file, but it is there; give --force to write over it")


def _scheme_table(request: _Request) -> tuple[SchemeTable, dict[str, str]]:
    """Returns the schemes that may be used and why the others may not."""
    from hgraph.scheme_text import parse_scheme
    from strategies.scheme_table import SchemeLimits, scheme_table

    num_ranks = request.topology.num_ranks
    profile = request.costs.profile(num_ranks)
    measured = frozenset(name for name, own in request.costs.schemes.items() if own.origin == "measured")
    model = request.costs.model
    limits = SchemeLimits(
        heads=None if model is None else model.heads,
        layers=None if model is None else model.layers,
        ranks_per_node=min(len(node.ranks) for node in request.topology.nodes),
        across=frozenset(profile.schemes) if request.across_nodes else measured,
        with_cp=request.with_cp,
    )
    costs = {parse_scheme(name): cost for name, cost in profile.schemes.items()}
    schemes, left_out = scheme_table(costs, num_ranks, limits)
    return schemes, {**left_out, **profile.absent}


def _proposal(request: _Request, schemes: SchemeTable) -> Proposal:
    from strategies.length_data import sample_batches
    from strategies.propose import judge, propose
    from strategies.propose_published import published_layouts

    profile = request.costs.profile(request.topology.num_ranks)
    batches = sample_batches(
        request.data, tokens=request.tokens, longest=request.longest, count=request.num_batches, seed=request.seed
    )
    clock = _clock(request)
    with _progress() as progress:
        if request.method == "search":
            return propose(
                schemes, profile, request.topology, batches,
                longest=request.longest, options=request.options, progress=progress, clock=clock,
            )  # fmt: skip
        plans = published_layouts(
            schemes, request.topology.num_ranks, request.data.lengths,
            longest=request.longest, length_step=request.length_step, progress=progress,
        )  # fmt: skip
        layouts = list(dict.fromkeys(plan.layout for plan in plans))
        return judge(
            schemes, profile, request.topology, batches, layouts,
            longest=request.longest, options=request.options, progress=progress, clock=clock,
        )  # fmt: skip


def _clock(request: _Request) -> StepClock:
    from hgraph.communication_costs import CommunicationCosts
    from hgraph.step_parts import StepClock

    if request.communication == "none":
        return StepClock()
    assert request.costs.model is not None
    return StepClock(request.communication, CommunicationCosts(request.costs.model, request.topology, planned_ranks=0))


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Gives what shows progress as a bar on a terminal, a new one for each kind of work."""
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}  # type: ignore[type-arg]

    def show(what: str, done: int, total: int) -> None:
        if what not in bars:
            for bar in bars.values():
                bar.close()
            bars[what] = tqdm(desc=what, total=total, leave=False, disable=None, file=sys.stderr)
        bars[what].update(done - bars[what].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()


def _header(request: _Request, proposal: Proposal) -> str:
    return (
        f"# Proposed by hgraph propose (--method {request.method}) for {request.topology.num_ranks} ranks: costs\n"
        f"# {request.profile}, lengths {request.lengths} cut at {request.longest}, "
        f"{request.tokens} tokens a step, {proposal.num_batches} batches of seed {request.seed}.\n"
        f"# Mean predicted step: {proposal.mean_ms:.0f} ms, {_counted(request)}.\n"
    )


def _counted(request: _Request) -> str:
    return "without bridges" if request.communication == "none" else f"{request.communication} communication counted"


def _show(request: _Request, proposal: Proposal, left_out: dict[str, str], above: AboveLongest, path: str) -> None:
    click.echo(
        f"{proposal.num_batches} batches of {request.tokens:,} tokens, seed {request.seed}; {above}; "
        f"{request.topology.num_ranks} ranks on {len(request.topology.nodes)} nodes"
    )
    if left_out:
        click.echo("schemes left out: " + "; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    if proposal.idle:
        click.echo(f"{proposal.idle} ranks stay idle: no replica of these schemes fits into them")
    headers = ("strategy", "holds", "fastest in", "mean ms without it")
    rows = [
        [own.name, f"{own.longest:,}", f"{own.share:.0%}", _ms(own.without_ms, "needed")] for own in proposal.strategies
    ]
    out().print(table(f"Pool, written to {path}", headers, rows, numbers=(1, 2, 3)))
    sizes = ", ".join(f"{number}: {ms:,.0f}" for number, ms in enumerate(proposal.means_ms, start=1))
    click.echo(f"mean ms by number of strategies: {sizes}")
    gained = "" if proposal.static_ms is None else f" ({proposal.static_ms / proposal.mean_ms:.2f} times as long)"
    click.echo(
        f"mean predicted step {proposal.mean_ms:,.0f} ms, {_counted(request)}; best layout of equal replicas, balanced "
        f"by the same planner: {proposal.static}, {_ms(proposal.static_ms, 'not for every batch')} ms{gained}; "
        f"all {proposal.num_candidates:,} candidates together, as estimated: {proposal.every_ms:,.0f} ms; "
        f"{proposal.num_planned:,} plans made"
    )


def _as_data(
    request: _Request, proposal: Proposal, left_out: dict[str, str], above: AboveLongest, path: str
) -> dict[str, Any]:
    return {
        "path": path,
        "method": request.method,
        "ranks": request.topology.num_ranks,
        "tokens": request.tokens,
        "seed": request.seed,
        "communication": request.communication,
        "lengths": {"source": request.data.source, **asdict(above)},
        "left_out": left_out,
        "strategies": [
            {
                "name": own.name,
                "schemes": dict(Counter(str(replica.scheme) for replica in strategy.replicas)),
                "longest": own.longest,
                "share": own.share,
                "without_ms": own.without_ms,
            }
            for own, strategy in zip(proposal.strategies, proposal.pool.strategies, strict=True)
        ],
        **{
            name: getattr(proposal, name)
            for name in (
                "mean_ms", "means_ms", "static", "static_ms", "every_ms", "num_batches", "num_candidates",
                "num_planned", "idle", "interrupted",
            )
        },
    }  # fmt: skip


def _ms(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:,.0f}"
