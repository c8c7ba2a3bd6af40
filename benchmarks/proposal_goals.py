"""Holds our proposed pools against static layouts and published pools, on batches that no proposal has seen.

    python benchmarks/proposal_goals.py FOLDER
    python benchmarks/proposal_goals.py FOLDER --held-out 32 --only 32b-64gpu --json result.json

FOLDER holds published_plans.json and lengths/NAME.json, the whole length sets; held-out batches are drawn from these,
the pools were proposed by the small samples that come along. Everything is computation alone, the simulated schedule,
without a solver. Columns are mean step times over that of our pool: *first-fit-decreasing* and *balanced*, packs of
the context window dealt in turn or to the least work; *same planner*, equal replicas planned as ours are; of each the
layout that holds the context window and is best over the very batches; *published pool*, planned as ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the packages and `benchmarks` itself, from anywhere

from benchmarks.results_cases import CLUSTER, Case, cases
from hgraph.analytic_cost import with_analytic
from hgraph.communication_costs import resized
from hgraph.profile_file import read_profile_file
from hgraph.step_parts import StepClock
from hgraph.strategy import Pool
from hgraph.strategy_file import load_pool
from hgraph.topology_file import load_topology
from strategies.baselines import Assign, assign_balanced, assign_packs
from strategies.intervals import ratio_interval
from strategies.ladder import homogeneous_strategies
from strategies.length_data import read_lengths, sample_batches
from strategies.options import PlannerOptions
from strategies.planner import Planner
from strategies.systems import Setting, planned_assign

SETTINGS = {
    ("32b-64gpu", 32_768, 200_000),
    ("13b-32gpu", 16_384, 200_000),
    ("7b-32gpu", 32_768, 100_000),
    ("32b-1024gpu", 32_768, 1_600_000),
}
"""Those of the published batches."""
LARGE_TOKENS = 1_000_000
FEW = 4
"""Held-out batches at most where a step has more tokens than that."""
SEED = 5_000
"""Of held-out batches; not that of any proposal."""
STATIC = {"first-fit-decreasing": assign_packs, "balanced": assign_balanced}

Batch = Sequence[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of published_plans.json and lengths/")
    parser.add_argument("--held-out", type=int, default=32, help="held-out batches of each length set")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    published = json.loads((options.folder / "published_plans.json").read_text())["cases"]
    rows = []
    for case in cases():
        asked = (case.group.name, case.longest, case.tokens) in SETTINGS and options.only in case.name
        if not asked or case.variant == "published" or not case.pool.exists():
            continue
        data = read_lengths(options.folder / "lengths" / f"{case.lengths}.json")
        own = [one["batch"] for one in published if one["group"] == f"{case.group.name}/{case.lengths}"]
        count = options.held_out if case.tokens <= LARGE_TOKENS else min(FEW, options.held_out)
        drawn = sample_batches(data, tokens=case.tokens, longest=case.longest, count=count, seed=SEED)
        for kind, batches in (("held-out", drawn), ("published", own)):
            if not batches:
                continue
            rows.append({"setting": case.name, "kind": kind, "batches": len(batches), **compared(case, batches)})
            print(text(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def compared(case: Case, batches: Sequence[Batch]) -> dict[str, Any]:
    """Returns the mean time in ms of our pool, the strategies that it took, and the ratios of all others to it."""
    pool, published = load_pool(case.pool), load_pool(case.published)
    measured = read_profile_file(case.group.profile)
    topology = resized(load_topology(CLUSTER), case.group.num_ranks)
    setting = Setting(measured.profile(case.group.num_ranks), StepClock(), case.longest)
    costs = with_analytic(measured, case.larger_schemes, topology).profile(case.group.num_ranks)
    ours_ms, taken = planned(pool, replace(setting, profile=costs), batches)
    others_ms = {name: static_ms(setting, case, assign, batches) for name, assign in STATIC.items()}
    others_ms["same planner"] = static_ms(setting, case, planned_assign(setting), batches)
    others_ms["published pool"] = planned(published, setting, batches)[0]
    return {
        "mean_ms": sum(ours_ms) / len(ours_ms),
        "taken": dict(Counter(taken).most_common()),
        "over": {name: _interval(other_ms, ours_ms) for name, other_ms in others_ms.items()},
        "slower_batches": sum(
            1 for own, other in zip(ours_ms, others_ms["same planner"], strict=True) if own > other * (1 + 1e-9)
        ),
    }


def planned(pool: Pool, setting: Setting, batches: Sequence[Batch]) -> tuple[list[float], list[str]]:
    """Returns the time in ms of the first checked plan of every batch, and its strategy."""
    planner = Planner(pool, setting.profile, PlannerOptions(program=False))
    plans = [planner.plan(batch) for batch in batches]
    return [plan.predicted_ms for plan in plans], [plan.strategy for plan in plans]


def static_ms(setting: Setting, case: Case, assign: Assign, batches: Sequence[Batch]) -> list[float]:
    """Returns the times in ms of the layout of equal replicas that is best over these batches."""
    equal = homogeneous_strategies(setting, case.group.num_ranks)
    able = [one for one in equal if setting.limit(one) >= case.longest]
    times_ms = [
        [setting.clock.ms((assign(one, setting.profile, batch, case.longest),)) for batch in batches] for one in able
    ]
    return min(times_ms, key=sum)


def _interval(others_ms: Sequence[float], ours_ms: Sequence[float]) -> list[float]:
    interval = ratio_interval(others_ms, ours_ms, SEED)
    return [interval.value, interval.low, interval.high]


def text(row: dict[str, Any]) -> str:
    """Returns a row of a table in markdown."""
    over = ["{:.3f} ({:.3f} to {:.3f})".format(*interval) for interval in row["over"].values()]
    cells = [row["setting"], f"{row['batches']} {row['kind']}", f"{row['mean_ms']:,.0f}", *over]
    return "| " + " | ".join([*cells, str(row["slower_batches"])]) + " |"


if __name__ == "__main__":
    main()
