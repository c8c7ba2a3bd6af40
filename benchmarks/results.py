"""Runs the ladder on every published setting and writes docs/results.md.

    python benchmarks/results.py                         # what is not in results/ladder.json yet, then the page
    python benchmarks/results.py --only 32b-64gpu        # settings whose name has this in it
    python benchmarks/results.py --page                  # the page alone, from what was run
    python benchmarks/results.py --again --batches 20    # everything anew, with so many timed batches
    python benchmarks/results.py --propose               # our pools, too, are proposed anew

A setting is a model on a number of GPUs, one of the four length samples, a context window and the tokens of a step
(benchmarks/results_cases.py). Pools lie in benchmarks/pools: `proposed/` has one for each setting, made by `hgraph
propose` where it is missing, from other batches than those that are timed; `*.published.yaml` are those of the
published planner. Everything depends on the seeds alone, but for the CPU times.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the packages and `benchmarks` itself, from anywhere

from benchmarks.results_cases import CLUSTER, Case, cases
from benchmarks.results_page import page
from benchmarks.results_pools import propose_pool
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
CALIBRATION = 6
SEED = 1_000
"""Not that of any proposal."""


class Runner:
    """Runs cases; the costs of communication of one model and cluster are worked out once."""

    def __init__(self, batches: int | None) -> None:
        self.batches = batches
        self.costs: dict[tuple[str, int], CommunicationCosts] = {}
        self.pools: dict[Path, Pool] = {}

    def run(self, case: Case) -> dict[str, Any]:
        """Returns the systems of a case as data."""
        topology = resized(load_topology(CLUSTER), case.group.num_ranks)
        profile = with_analytic(read_profile_file(case.group.profile), case.larger_schemes, topology)
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
            "facts": {one.key: asdict(one.facts) for one in result.systems},
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


def stored() -> dict[str, Any]:
    """Returns the results that are there, by the name of their setting."""
    found: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    return found


def page_text() -> str:
    """Returns docs/results.md as the stored results have it."""
    store, names = stored(), [case.name for case in cases()]
    found = [store[name] for name in names if name in store]
    return page(found, len(names) - len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", nargs="*", default=[""], help="settings whose name has a TEXT in it")
    parser.add_argument("--batches", type=int, help="timed batches of a setting")
    parser.add_argument("--again", action="store_true", help="run settings that are there already")
    parser.add_argument("--propose", action="store_true", help="propose our pools anew; implies --again")
    parser.add_argument("--page", action="store_true", help="write the page, run nothing")
    options = parser.parse_args()
    if options.batches is not None and options.batches < 1:
        parser.error(f"--batches: expected 1 or more, got {options.batches}")
    store = stored()
    runner = Runner(options.batches)
    chosen = dict.fromkeys(case for text in options.only for case in cases() if text in case.name)
    for case in () if options.page else chosen:
        if case.name in store and not options.again and not options.propose:
            continue
        proposal = store.get(case.name, {}).get("proposal")
        if case.variant != "published" and (options.propose or not case.pool.exists()):
            proposal = propose_pool(case)
        store[case.name] = {**runner.run(case), "proposal": proposal}
        STORE.write_text(json.dumps(store, indent=1, sort_keys=True) + "\n")
        print(f"{case.name}: done", flush=True)
    PAGE.write_text(page_text())
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
