"""Runs the ladder on every published setting and writes docs/results.md.

    python benchmarks/results.py                         # what is not in results/ladder.json yet, then the page
    python benchmarks/results.py --only 32b-64gpu        # settings whose name has this in it
    python benchmarks/results.py --page                  # the page alone, from what was run
    python benchmarks/results.py --again --batches 20    # everything anew, with so many timed batches

A setting is a model on a number of GPUs, one of the four length samples, a context window and the tokens of a step.
Pools lie in benchmarks/pools and were fixed before: `*.proposed.yaml` by `hgraph propose` (the first lines say how),
`*.published.yaml` are those of the published planner. Everything depends on the seeds alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the packages and `benchmarks` itself, from anywhere

from benchmarks.results_page import page
from hgraph.analytic_cost import with_analytic
from hgraph.communication_costs import CommunicationCosts, resized
from hgraph.profile_file import read_profile_file
from hgraph.scheme_profile import ProfileFile
from hgraph.strategy import Pool
from hgraph.strategy_file import load_pool
from hgraph.topology_file import load_topology
from strategies.ladder import REFERENCE
from strategies.length_data import read_lengths
from strategies.simulation import Simulation, Workload, result_data

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks" / "results" / "ladder.json"
PAGE = ROOT / "docs" / "results.md"
LENGTHS = ("commoncrawl-like", "github-like", "python-source", "web-docs")
WINDOWS = (16_384, 32_768)
CLUSTER = "8x8-a800"
LARGER_SCHEMES = ("tp8.cp2", "tp8.cp4", "tp16.cp2", "tp16.cp4", "tp32", "tp16.pp2", "tp16.pp4")
"""Schemes for the longest sequences on 1,024 GPUs; nobody measured them, so their costs are analytic."""
CALIBRATION = 6
SEED = 1_000
"""Not that of any proposal."""


@dataclass(frozen=True, slots=True)
class Group:
    """A model on a number of GPUs, with the tokens of a step and how many batches are timed."""

    name: str
    profile: str
    num_ranks: int
    tokens: tuple[int, ...]
    batches: int


GROUPS = (
    Group("7b-32gpu", "llama-7b.a800-80gb", 32, (100_000, 200_000), 8),
    Group("13b-32gpu", "llama-13b.a800-80gb", 32, (100_000, 200_000), 8),
    Group("32b-64gpu", "llama-32b.a800-80gb", 64, (100_000, 200_000), 8),
    Group("32b-1024gpu", "llama-32b.a800-80gb", 1_024, (1_600_000,), 4),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One setting; `variant` names another pool of ours than the proposed one."""

    group: Group
    lengths: str
    longest: int
    tokens: int
    variant: str = ""

    @property
    def name(self) -> str:
        return "/".join(
            part for part in (self.group.name, self.lengths, str(self.longest), str(self.tokens), self.variant) if part
        )

    @property
    def pool(self) -> Path:
        """The pool of our planner: proposed for the length set, or what `variant` says."""
        if self.variant == "published":
            return self.published
        middle = f".{self.variant}" if self.variant else ""
        return ROOT / "benchmarks" / "pools" / f"{self.group.name}.{self.lengths}{middle}.proposed.yaml"

    @property
    def published(self) -> Path:
        """The published pool: one for the group, or one for each length set."""
        folder = ROOT / "benchmarks" / "pools"
        own = folder / f"{self.group.name}.{self.lengths}.published.yaml"
        return own if own.exists() else folder / f"{self.group.name}.published.yaml"


def cases() -> Iterator[Case]:
    """Yields every setting of the page."""
    for group in GROUPS:
        for tokens in group.tokens:
            for longest in WINDOWS:
                for lengths in LENGTHS:
                    yield Case(group, lengths, longest, tokens)
                    if group.num_ranks == 1_024 and longest == WINDOWS[-1]:
                        yield Case(group, lengths, longest, tokens, "published")
                        yield Case(group, lengths, longest, tokens, "larger-schemes")


class Runner:
    """Runs cases; the costs of communication of one model and cluster are worked out once."""

    def __init__(self, batches: int | None) -> None:
        self.batches = batches
        self.costs: dict[tuple[str, int], CommunicationCosts] = {}
        self.pools: dict[Path, Pool] = {}

    def run(self, case: Case) -> dict[str, Any]:
        """Returns the systems of a case as data."""
        topology = resized(load_topology(CLUSTER), case.group.num_ranks)
        profile = read_profile_file(case.group.profile)
        if case.variant == "larger-schemes":
            profile = with_analytic(profile, LARGER_SCHEMES, topology)
        count = self.batches or case.group.batches
        workload = Workload(read_lengths(case.lengths), case.tokens, case.longest, count, CALIBRATION, SEED)
        simulation = Simulation(
            profile,
            self._pool(case.pool),
            topology,
            workload,
            self._pool(case.published),
            keys=("pool",) if case.variant else (),
            costs=self._costs(profile, topology.num_ranks),
        )
        result = simulation.run()
        facts = {one.key: one.facts.longest_share for one in result.systems}
        return {
            "group": case.group.name,
            "lengths": case.lengths,
            "longest": case.longest,
            "tokens": case.tokens,
            "variant": case.variant,
            "batches": count,
            "calibration": CALIBRATION,
            "seed": SEED,
            "pool": [strategy.name for strategy in simulation.pool.strategies],
            "longest_share": facts,
            "systems": result_data(result, REFERENCE, SEED),
        }

    def _pool(self, path: Path) -> Pool:
        if path not in self.pools:
            self.pools[path] = load_pool(path)
        return self.pools[path]

    def _costs(self, profile: ProfileFile, num_ranks: int) -> CommunicationCosts:
        key = (profile.name, num_ranks)
        if key not in self.costs:
            assert profile.model is not None
            topology = resized(load_topology(CLUSTER), num_ranks)
            self.costs[key] = CommunicationCosts(profile.model, topology, planned_ranks=0)
        return self.costs[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="settings whose name has TEXT in it")
    parser.add_argument("--batches", type=int, help="timed batches of a setting")
    parser.add_argument("--again", action="store_true", help="run settings that are there already")
    parser.add_argument("--page", action="store_true", help="write the page, run nothing")
    options = parser.parse_args()
    if options.batches is not None and options.batches < 1:
        parser.error(f"--batches: expected 1 or more, got {options.batches}")
    store: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    runner = Runner(options.batches)
    for case in () if options.page else cases():
        if options.only not in case.name or (case.name in store and not options.again):
            continue
        if not case.pool.exists():
            print(f"{case.name}: left out, there is no {case.pool.name}", flush=True)
            continue
        store[case.name] = runner.run(case)
        STORE.write_text(json.dumps(store, indent=1, sort_keys=True) + "\n")
        print(f"{case.name}: done", flush=True)
    PAGE.write_text(page([store[case.name] for case in cases() if case.name in store]))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
