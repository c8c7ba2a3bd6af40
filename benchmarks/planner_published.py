"""Plans the batches of published plans again, with the same pools and costs, and prints both side by side.

    python benchmarks/planner_published.py FOLDER
    python benchmarks/planner_published.py FOLDER --cases 32b-64gpu --program --json result.json

FOLDER holds published_plans.json (pools, batches, the published planner's plans with their flow times and a lower
bound) and profiles/NAME.yaml (a, b, c of every scheme). Each batch is planned without a solver, and with --program once
more with it. Times: *flow*, the sum over a replica's micro-batches plus (pp - 1) times its largest, and *simulated*,
the schedule in use; the slowest replica counts. CPU time of this process is given, since it does not depend on what
else the machine does. The exit code is 1 where a plan's flow time is above the published one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML
from tqdm import tqdm

from hgraph.plan import StepPlan
from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Pool, Replica, Scheme, Strategy
from strategies.options import PlannerOptions
from strategies.planner import Planner

ROUNDING_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Row:
    """One case; times in ms. `imbalance` is the greatest over the mean time of the plan's replicas."""

    case: str
    num_sequences: int
    published_flow_ms: float
    published_bound_ms: float
    strategy: str
    flow_ms: float
    simulated_ms: float
    bound_ms: float
    gap: float
    solver: str
    first_flow_ms: float
    first_gap: float
    first_cpu_ms: float
    total_cpu_ms: float
    imbalance: float

    @property
    def lower(self) -> float:
        """How much lower the flow time is than the published one, as a share."""
        return 1.0 - self.flow_ms / self.published_flow_ms

    @property
    def is_worse(self) -> bool:
        """Whether it is above the published one, which is rounded to a thousandth of a millisecond."""
        return self.flow_ms > self.published_flow_ms + ROUNDING_MS


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of published_plans.json and profiles/")
    parser.add_argument("--cases", default="", help="only cases whose id contains this")
    parser.add_argument("--program", action="store_true", help="plan with the solver too")
    parser.add_argument("--objective", choices=["simulated", "flow"], default="simulated")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    arguments = parser.parse_args()
    data = json.loads((arguments.folder / "published_plans.json").read_text())
    cases = [case for case in data["cases"] if arguments.cases in case["id"]]
    if not cases:
        parser.error(f"no case contains {arguments.cases!r}; there are {', '.join(c['id'] for c in data['cases'])}")
    options = PlannerOptions(program=arguments.program, objective=arguments.objective)
    rows = []
    for case in tqdm(cases, disable=not sys.stderr.isatty()):
        profile = profile_of_case(case, arguments.folder)
        rows.append(_row(case, Planner(pool_of_case(case, data["pools"]), profile, options), arguments.program))
    _show(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.is_worse for row in rows))


def profile_of_case(case: dict[str, Any], folder: Path) -> Profile:
    own = YAML(typ="safe").load((folder / "profiles" / f"{case['profile']}.yaml").read_text())
    costs = {(row["tp"], row["pp"]): row for row in own["schemes"]}
    schemes = {}
    for text, limit in case["scheme_max_seqlen"].items():
        tp, pp = map(int, text.split("x"))
        row = costs[tp, pp]
        schemes[str(Scheme.uniform(tp, pp))] = SchemeCost(float(row["a"]), float(row["b"]), float(row["c"]), limit)
    return Profile(schemes, {})


def pool_of_case(case: dict[str, Any], pools: dict[str, list[list[list[int]]]]) -> Pool:
    strategies = []
    for number, own in enumerate(pools[case["pool"]]):
        replicas: list[Replica] = []
        for tp, pp in own:
            first = sum(replica.scheme.num_ranks for replica in replicas)
            replicas.append(Replica(Scheme.uniform(tp, pp), tuple(range(first, first + tp * pp))))
        strategies.append(Strategy(str(number), tuple(replicas)))
    return Pool(case["gpus"], tuple(strategies))


def _row(case: dict[str, Any], planner: Planner, with_program: bool) -> Row:
    lengths: list[int] = case["batch"]
    # Warm: a step of the same pool has been planned before.
    planner.first_plan(lengths[: len(lengths) // 2])
    start_s = time.process_time()
    first = planner.first_plan(lengths)
    first_s = time.process_time() - start_s
    plan: StepPlan = first
    if with_program:
        start_s = time.process_time()
        plan = planner.plan(lengths)
    times_ms = [replica.predicted_ms for replica in plan.replicas]
    return Row(
        case=case["id"],
        num_sequences=len(lengths),
        published_flow_ms=case["published"]["flow_ms"],
        published_bound_ms=case["bound"]["pool_ms"],
        strategy=plan.strategy,
        flow_ms=plan.flow_ms,
        simulated_ms=plan.predicted_ms,
        bound_ms=plan.bound_ms,
        gap=plan.gap,
        solver=plan.solver,
        first_flow_ms=first.flow_ms,
        first_gap=first.gap,
        first_cpu_ms=1e3 * first_s,
        total_cpu_ms=1e3 * (time.process_time() - start_s),
        imbalance=max(times_ms) / statistics.mean(times_ms),
    )


def _show(rows: Sequence[Row]) -> None:
    table = Table("case", "published", "flow", "lower", "simulated", "bound", "gap", "first ms", "total ms", "solver")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.published_flow_ms:,.1f}",
            f"{row.flow_ms:,.1f}" + (" above" if row.is_worse else ""),
            f"{100 * row.lower:.2f}%",
            f"{row.simulated_ms:,.1f}",
            f"{row.bound_ms:,.1f}",
            f"{100 * row.gap:.2f}%",
            f"{row.first_cpu_ms:,.0f}",
            f"{row.total_cpu_ms:,.0f}",
            row.solver,
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for group in dict.fromkeys(row.case.split("/")[0] for row in rows):
        own = [row for row in rows if row.case.startswith(f"{group}/")]
        first_ms, gaps = [row.first_cpu_ms for row in own], [row.gap for row in own]
        ran = [row for row in own if row.solver != "heuristic"]
        gains = [1.0 - row.flow_ms / row.first_flow_ms for row in own if row.solver.startswith("highs")]
        better = f"a better plan in {len(gains)}" + (f" (mean {100 * statistics.mean(gains):.2f}%)" if gains else "")
        console.print(
            f"{group}: {len(own)} cases, mean {100 * statistics.mean(row.lower for row in own):.2f}% lower, "
            f"{sum(row.is_worse for row in own)} above the published flow time; "
            f"first plan {_spread(first_ms, '.0f')} ms of CPU; gap {_spread([100 * gap for gap in gaps], '.2f')} %; "
            f"solver in {len(ran)}, {better}"
        )


def _spread(values: Sequence[float], form: str) -> str:
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    return f"median {statistics.median(ordered):{form}}, 95th percentile {high:{form}}"


if __name__ == "__main__":
    raise SystemExit(main())
