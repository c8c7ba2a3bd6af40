"""`hgraph reshard` and `hgraph switch` as a stranger meets them; their figures against the plans."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import numpy
import pytest
import torch
from click.testing import CliRunner, Result

from hgraph.annotation import Annotation
from hgraph.bridge_plan import plan_bridge
from hgraph.bundles import TensorReshard
from hgraph.capture import Captured
from hgraph.check_reshard import check_reshard
from hgraph.errors import PlanError
from hgraph.reshard import lower_bound_elements, plan_reshard, reshard_bytes
from hgraph.reshard_plan import Collective, Move
from hgraph.reshard_text import held_texts, operation_text
from hgraph.strategy import Pool, Replica, Scheme, Stage, Strategy
from hgraph.topology import Link, uniform
from hgraph.topology_file import load_topology
from passes.pipelines import CompiledScheme
from runtime.bridge import Bridge
from runtime.bridge_planner import bridge_plans
from runtime.cli import main
from runtime.cli.options import load_run_config
from runtime.cli.switch import _inputs as make_inputs
from runtime.cli.traffic_report import whole_nodes
from runtime.layouts import switch_reshards
from tests.test_cli import ROOT, TINY, examples_of

POOL = """\
version: 1
ranks: 4
strategies:
  - name: large
    replicas: [{tp: 2, pp: 2}]
  - name: mixed
    replicas: [{tp: 2}, {tp: 1, count: 2}]
  - name: small
    replicas: [{tp: 1, count: 3}]
"""
TWO_NODES = """\
version: 1
name: two by two
nodes: 2
ranks_per_node: 2
local: {bandwidth_gb_s: 10, latency_us: 10}
network: {bandwidth_gb_s: 1, latency_us: 50}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder that holds a pool and a cluster, nothing else; the test runs in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL)
    (tmp_path / "two.yaml").write_text(TWO_NODES)
    return tmp_path


def hgraph(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="hgraph")


def answer(*arguments: str) -> str:
    """Returns what a command says where it succeeds."""
    result = hgraph(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def message(*arguments: str) -> str:
    """Returns what a command says on stderr when it fails; nothing goes to stdout, and there is no traceback."""
    result = hgraph(*arguments)
    assert result.exit_code in (1, 2) and isinstance(result.exception, SystemExit), result.output
    assert result.stdout == ""
    return result.stderr


PAIRS = [
    ("0-3[S(0)]", "0-3[S(1)]", "8x6"),
    ("0-1[P] + 2[] @ P", "0-2[S(0)]", "7x4"),
    ("0-3[2x2: P, S(1)]", "3,2,1,0[S(0)]", "5x6"),
    ("0-2[P(max)]", "3[]", "4"),
    ("0-1[S(1)] + 2[] @ R", "1-3[R]", "3x5x2"),
    ("0[]", "0-3[R]", "scalar"),
    ("0-3[S(0)]", "0-3[S(0)]", "4"),
]


class TestReshard:
    def test_boxes_steps_and_bytes(self) -> None:
        text = answer("reshard", "0-3[S(0)]", "0-1[R]", "--shape", "7x6", "--dtype", "bfloat16", "--bridge")
        assert text.startswith("0-3[S(0)] -> 0-1[R], 7x6 bfloat16, all ranks in one node (--cluster names others)\n")
        assert "│    0 │ [0:2, 0:6] │ [0:7, 0:6] │\n" in text
        assert "│    3 │ [6:7, 0:6] │ -          │\n" in text
        assert "rank 2 sends [4:6, 0:6] of its source to rank 0, which writes it to its target (24 B)" in text
        assert "rank 0 copies [0:2, 0:6] from its source to its target\n" in text
        assert "│ all   │   120 │         120 │ 1.000 │" in text
        assert "check: complete, exact and non-redundant, as check_reshard proves" in text

    def test_nothing_to_do(self) -> None:
        text = answer("reshard", "0-3[S(0)]", "0-3[S(0)]", "--shape", "4")
        assert "Steps: none, every rank holds what it needs" in text and "0 messages" in text

    @pytest.mark.parametrize(("source", "target", "shape"), PAIRS)
    def test_json_has_the_figures_of_the_plan(self, source: str, target: str, shape: str) -> None:
        data = json.loads(answer("reshard", source, target, "--shape", shape, "--dtype", "float64", "--json"))
        lengths = () if shape == "scalar" else tuple(map(int, shape.split("x")))
        start, end = Annotation.parse(source), Annotation.parse(target)
        plan = plan_reshard(start, end, lengths)
        expected = reshard_bytes(plan, 8)
        assert {(i, j): count for i, j, count in data["sender_receiver_bytes"]} == expected
        assert data["total_bytes"] == sum(expected.values())
        assert data["lower_bound_bytes"] == 8 * lower_bound_elements(start, end, lengths) <= data["total_bytes"]
        assert (data["source"], data["target"], tuple(data["shape"])) == (str(start), str(end), lengths)
        assert [[one["text"] for one in phase] for phase in data["phases"]] == [
            [operation_text(operation) for operation in phase] for phase in plan.phases
        ]
        assert data["proved"] and data["fault"] is None and data["predicted_ms"] is None

    @pytest.mark.parametrize(("source", "target", "shape"), PAIRS)
    def test_plans_of_bridges_reach_the_lower_bound(self, source: str, target: str, shape: str) -> None:
        options = ["--shape", shape, "--bridge", "--cluster", "two.yaml", "--json"]
        data = json.loads(answer("reshard", source, target, *options))
        assert data["proved"] and data["cluster"] == "two by two"
        for kind in ("network", "local"):
            links = data["links"][kind]
            assert links["bytes"] == links["lower_bound_bytes"], kind
        assert (data["predicted_ms"] > 0) == (data["total_bytes"] > 0)

    def test_bytes_cross_the_network_once_with_relays(self) -> None:
        arguments = ["reshard", "0[]", "2-3[R]", "--shape", "1000", "--cluster", "two.yaml"]
        assert "│ over the network │ 8,000 │       4,000 │ 2.000 │" in answer(*arguments)
        text = answer(*arguments, "--bridge")
        assert "│ over the network │ 4,000 │       4,000 │ 1.000 │" in text
        assert "of its target to rank" in text and "predicted 0.0644 ms" in text

    def test_only_nodes_that_take_part_count(self) -> None:
        text = answer("reshard", "0[]", "8[]", "--shape", "1000", "--bridge", "--cluster", "8x8-a800")
        assert "(2 nodes used)" in text
        assert "│ network, sending node   │  4.00 kB │ node0  │ 2.00 kB │            2.00 │" in text
        assert "network, sending port" in text, "two GPUs share a port there"

    def test_long_phases_are_cut(self) -> None:
        text = answer("reshard", "0[]", "1-60[S(0)]", "--shape", "60", "--bridge")
        assert "  and 20 more; --json has all\n" in text

    def test_picture(self, folder: Path) -> None:
        text = answer("reshard", "0-3[S(0)]", "0-3[R]", "--shape", "8", "--picture", "new/traffic.svg")
        assert text.endswith("wrote new/traffic.svg\n")
        svg = (folder / "new" / "traffic.svg").read_text()
        assert "0-3[S(0)] -&gt; 0-3[R], 8 float32" in svg and "rank 0 -&gt; rank 3: 8 B (8 bytes)" in svg

    def test_a_plan_that_is_not_proved_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: object) -> None:
            raise PlanError("reshard plan is not complete: rank 1 lacks [0:1]")

        monkeypatch.setattr("runtime.cli.reshard.check_reshard", refuse)
        result = hgraph("reshard", "0[]", "1[]", "--shape", "3")
        assert result.exit_code == 1
        assert "check: reshard plan is not complete: rank 1 lacks [0:1]" in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["0-3", "0[]", "--shape", "4"], "SRC '0-3': subgroup: expected ranks[placements], as in 0-3[S(0)], got"),
            (
                ["0[]", "0-1[X]", "--shape", "4"],
                "DST '0-1[X]': placement: expected R, S(dim), S(dim:sizes), P or P(max)",
            ),
            (
                ["0-3[S(0), S(1)]", "0[]", "--shape", "4x4"],
                "SRC '0-3[S(0), S(1)]': subgroup: expected one placement per",
            ),
            (
                ["0-1[R] + 1[] @ R", "0[]", "--shape", "4"],
                "SRC '0-1[R] + 1[] @ R': annotation: rank 1 is in two subgroups",
            ),
            (
                ["0[]", "0-1[S(2)]", "--shape", "8x6"],
                "DST '0-1[S(2)]' does not fit --shape 8x6: 0-1[S(2)]: S(2) on a tensor of 2 dims; expected a dim",
            ),
            (
                ["0-1[S(0:3,4)]", "0[]", "--shape", "8"],
                "SRC '0-1[S(0:3,4)]' does not fit --shape 8: S(0:3,4): expected 2 sizes that sum to 8, got 2 sizes",
            ),
            (["0[]", "1[]", "--shape", "8y6"], "--shape: expected lengths of 0 or more, such as 8x6, or `scalar`; got"),
            (["0[]", "1[]", "--shape", "-8"], "--shape: expected lengths of 0 or more, such as 8x6, or `scalar`; got"),
            (["0[]", "1[]", "--shape", ""], "--shape: expected lengths of 0 or more, such as 8x6, or `scalar`; got ''"),
            *(
                (
                    ["0[]", "1[]", "--shape", shape],
                    "--shape: expected lengths and a number of elements below 2^60 (1,152,921,504,606,846,976), got "
                    f"{shape[:77]}",
                )
                for shape in (
                    "99999999999999999999",
                    "9000000000000000000",
                    "0x9000000000000000000",
                    "1073741824x1073741824",
                    "9" * 5000,
                )
            ),
            (
                ["0[]", "1-40[R]", "--shape", "576460752303423488"],
                "--shape 576460752303423488: expected a plan that moves less than 2^62 bytes between all ranks, got ",
            ),
            (
                ["0-99999999[S(0)]", "0[]", "--shape", "8"],
                "SRC '0-99999999[S(0)]': ranks: expected ranks below 1048576 (2^20), got rank 99999999; write 0-3",
            ),
            (
                ["0[]", "0-1[]", "--shape", "8"],
                "DST '0-1[]': subgroup: expected a mesh of 2 ranks, got no axis; write 0-1[R] where each holds the",
            ),
            (
                ["0[]", "4[]", "--shape", "8", "--cluster", "two.yaml"],
                "--cluster two.yaml: expected 5 ranks or more, for ranks 0 to 4 take part; got 4",
            ),
            (
                ["0[]", "1[]", "--shape", "8", "--cluster", "8x8-a80"],
                "cluster '8x8-a80': expected a file or one of the names",
            ),
            (
                ["0[]", "1[]", "--shape", "8", "--picture", "a.png"],
                "--picture a.png: PNG is not there, for nothing this package needs can draw text as pixels; name a",
            ),
            (
                ["0[]", "1[]", "--shape", "8", "--picture", "a"],
                "--picture a: expected a name that ends in .svg, got 'no end",
            ),
            (
                ["0[]", "1[]", "--shape", "8", "--picture", "pool.yaml/a.svg"],
                "pool.yaml: expected a folder to write to, but pool.yaml is a file",
            ),
        ],
    )
    def test_bad_input(self, arguments: list[str], expected: str) -> None:
        assert message("reshard", *arguments).startswith(f"Error: {expected}")

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("bridge", [[], ["--bridge"]], ids=["collectives", "bridge"])
    def test_the_largest_tensors_have_exact_figures(self, dtype: str, bridge: list[str]) -> None:
        length, size = (2**60 - 1) // (2 if dtype == "float64" else 1), 8 if dtype == "float64" else 4
        data = json.loads(
            answer("reshard", "0,1[P]", "0[]", "--shape", f"000{length}", "--dtype", dtype, "--json", *bridge)
        )
        assert data["total_bytes"] == length * size and data["shape"] == [length]
        assert min(data["peak_extra_bytes"]) >= length * size

    def test_bad_annotations_are_answered_with_good_ones(self) -> None:
        hint = "; write 0-3[S(0)], 0-3[2x2: S(0), R] or 0-1[S(1)] + 2[] @ R (docs/concepts.md)\n"
        assert message("reshard", "0-1[]", "0[]", "--shape", "4").endswith(hint)

    def test_torch_is_not_waited_for(self) -> None:
        arguments = ["reshard", "0-1[P]", "0-1[S(0)]", "--shape", "4", "--bridge"]
        for words in (arguments, ["reshard", "--help"], ["switch", "--help"]):
            code = (
                "import sys; from runtime.cli import main\n"
                f"main({words!r}, standalone_mode=False)\nassert 'torch' not in sys.modules, 'torch was imported'"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


class TestTexts:
    @pytest.mark.parametrize(
        ("operation", "text"),
        [
            (Move(0, 1, ((0, 4),)), "rank 0 sends [0:4] of its source to rank 1, which writes it to its target"),
            (
                Move(0, 1, ((0, 4),), "sum", "source", "scratch"),
                "rank 0 sends [0:4] of its source to rank 1, which adds it to its scratch",
            ),
            (
                Move(0, 1, ((0, 4),), "max", "scratch"),
                "rank 0 sends [0:4] of its scratch to rank 1, which takes the maximum of it and its target",
            ),
            (Move(2, 2, (), "sum"), "rank 2 adds [] from its source to its target"),
            (Move(2, 2, ((1, 2), (3, 5))), "rank 2 copies [1:2, 3:5] from its source to its target"),
            (
                Collective("all_reduce", (0, 1, 3), (((0, 4),),) * 3, (((0, 4),),) * 3, "max"),
                "all-reduce (maximum) of [0:4] on ranks 0-1,3",
            ),
            (
                Collective("reduce_scatter", (0, 1), (((0, 4),),) * 2, (((0, 2),), ((2, 4),)), "sum"),
                "reduce-scatter (sum) of [0:4] on ranks 0-1: 0 gets [0:2]; 1 gets [2:4]",
            ),
            (
                Collective("all_gather", (0, 1), (((0, 2),), ((2, 4),)), (((0, 4),),) * 2, origin="target"),
                "all-gather into [0:4] on ranks 0-1 from their target: 0 gives [0:2]; 1 gives [2:4]",
            ),
            (
                Collective("all_to_all", (0, 1), (((0, 4),), ((0, 0),)), (((0, 2),), ((2, 4),))),
                "all-to-all on ranks 0-1: 0 gives [0:4], gets [0:2]; 1 gives nothing, gets [2:4]",
            ),
        ],
    )
    def test_operations(self, operation: Move | Collective, text: str) -> None:
        assert operation_text(operation) == text

    def test_large_groups_are_cut_short(self) -> None:
        parts = tuple(((rank, rank + 1),) for rank in range(20))
        text = operation_text(Collective("all_gather", tuple(range(20)), parts, (((0, 20),),) * 20))
        assert text.endswith("6 gives [6:7]; and so on to 19 gives [19:20]")

    def test_what_ranks_hold(self) -> None:
        held = held_texts(Annotation.parse("0-1[P] + 2-3[P] @ R"), (4,))
        assert held[1] == "[0:4], term 2 of 2 of a sum, copy 1 of 2"
        assert held[2] == "[0:4], term 1 of 2 of a sum, copy 2 of 2"
        assert held_texts(Annotation.parse("0-2[S(0)]"), (2, 3))[2] == "[2:2, 0:3] (empty)"
        assert held_texts(Annotation.parse("0-1[P(max)]"), ())[0] == "[], term 1 of 2 of a maximum"


SWITCH = ("switch", "--pool", "pool.yaml")
Inputs: TypeAlias = tuple[Pool, Captured, dict[str, CompiledScheme]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Returns the pool, the graph and the schemes of all strategies, as the command makes them, once for all tests."""
    path = tmp_path_factory.mktemp("pool") / "pool.yaml"
    path.write_text(POOL)
    config = load_run_config(None, str(path), TINY)
    return make_inputs(config, ("large", "mixed"))


@pytest.fixture
def compiled_once(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cli.switch._inputs", lambda *_: inputs)


def switched(*arguments: str) -> dict[str, Any]:
    return json.loads(answer(*SWITCH, "--json", *arguments, *TINY))


@pytest.mark.usefixtures("compiled_once")
class TestSwitch:
    def test_tables(self) -> None:
        text = answer(*SWITCH, "--from", "optimizer", "--to", "mixed", "--gradients", "--cluster", "two.yaml", *TINY)
        assert text.startswith("4 ranks on two by two, 2 nodes used\n")
        for part in (
            "Parameters, optimizer -> mixed: ",
            "Gradients, mixed -> optimizer: ",
            "│ over the network │",
            "│ inside nodes     │",
            "│ network, sending node ",
            "least possible",
            " in 1 bucket, predicted ",
            "peak extra memory of messages and sums, at most two buckets at a time: rank 0 ",
        ):
            assert part in text

    @pytest.mark.parametrize(
        ("start", "end"), [("optimizer", "mixed"), ("mixed", "optimizer"), ("large", "small"), ("mixed", "large")]
    )
    def test_figures_are_those_of_the_plan(self, start: str, end: str) -> None:
        data = switched("--from", start, "--to", end, "--gradients", "--cluster", "two.yaml", "--bucket-mb", "0.02")
        topology = load_topology("two.yaml")
        assert [move["kind"] for move in data["moves"]] == ["parameters", "gradients"]
        for move in data["moves"]:
            reshards = [
                TensorReshard(
                    t["name"], Annotation.parse(t["source"]), Annotation.parse(t["target"]), tuple(t["shape"])
                )
                for t in move["tensors"]
            ]
            plan = plan_bridge(reshards, topology, bucket_elements=5000)
            pairs = numpy.zeros((4, 4), dtype=int)
            for reshard in reshards:
                own = plan.reshard_plan(reshard.name)
                check_reshard(own)
                for (sender, receiver), count in reshard_bytes(own, 4).items():
                    pairs[sender, receiver] += count
            assert {(i, j): count for i, j, count in move["sender_receiver_bytes"]} == {
                (i, j): pairs[i, j] for i in range(4) for j in range(4) if pairs[i, j]
            }
            assert move["total_bytes"] == pairs.sum()
            assert move["links"]["network"]["bytes"] == pairs[:2, 2:].sum() + pairs[2:, :2].sum()
            assert move["loads"]["node sender"]["greatest_bytes"] == max(pairs[:2, 2:].sum(), pairs[2:, :2].sum())
            assert move["buckets"] == [list(bucket) for bucket in plan.buckets]
            assert move["links"]["network"]["bytes"] >= move["links"]["network"]["lower_bound_bytes"]
            for load in move["loads"].values():
                assert load["greatest_bytes"] >= load["least_possible_bytes"] - 1e-6 * load["greatest_bytes"]
            assert (move["predicted_ms"] > 0) == (pairs.sum() > 0) and len(move["peak_extra_bytes"]) == 4

    @pytest.mark.parametrize("name", ["large", "mixed", "small"])
    def test_bridges_are_those_of_training(self, name: str, inputs: Inputs) -> None:
        """What the command tells of the bridges of a strategy is what `Program` runs: the same plans."""
        pool, captured, compiled = inputs
        strategy = next(strategy for strategy in pool.strategies if strategy.name == name)
        dtypes = (torch.float32, torch.float32)
        topology = load_topology("two.yaml")
        inward, outward = bridge_plans(strategy, compiled, captured, 4, dtypes, bucket_mb=0.02, topology=topology)
        options = ("--cluster", "two.yaml", "--bucket-mb", "0.02")
        (parameters,) = switched("--from", "optimizer", "--to", name, *options)["moves"]
        _, gradients = switched("--from", name, "--to", "optimizer", "--gradients", *options)["moves"]
        for plan, move in ((inward, parameters), (outward, gradients)):
            assert [tensor["name"] for tensor in move["tensors"]] == [tensor.reshard.name for tensor in plan.tensors]
            assert move["buckets"] == [list(bucket) for bucket in plan.buckets]
            crossed = [Bridge(plan, rank, torch.float32).bytes_sent(rank) for rank in range(4)]
            sent = numpy.zeros(4, dtype=int)
            for sender, _, count in move["sender_receiver_bytes"]:
                sent[sender] += count
            assert crossed == sent.tolist()

    def test_layouts(self) -> None:
        """Each end holds what the pool says: the optimizer one piece a rank, replicas duplicates, gradients terms."""
        (move,) = switched("--from", "optimizer", "--to", "mixed")["moves"]
        head = next(tensor for tensor in move["tensors"] if tensor["name"] == "head.weight")
        assert (head["source"], head["target"]) == ("0-3[S(0)]", "0-1[S(0)] + 2[] + 3[] @ R")
        _, move = switched("--from", "large", "--to", "small", "--gradients")["moves"]
        head = next(tensor for tensor in move["tensors"] if tensor["name"] == "head.weight")
        assert (head["source"], head["target"]) == ("2-3[S(0)]", "0[] + 1[] + 2[] @ P")
        assert (move["source"], move["target"], move["dtype"]) == ("large", "small", "float32")

    def test_float64_counts_twice(self) -> None:
        arguments = ("--from", "optimizer", "--to", "mixed", "--gradients")
        single, double = switched(*arguments), switched(*arguments, "dtype=float64")
        for one, other in zip(single["moves"], double["moves"], strict=True):
            assert 2 * one["total_bytes"] == other["total_bytes"]
            assert 2 * one["lower_bound_bytes"] == other["lower_bound_bytes"]

    def test_pictures(self, folder: Path) -> None:
        arguments = ("--from", "large", "--to", "mixed", "--gradients", "--picture", "a.svg", *TINY)
        assert answer(*SWITCH, *arguments).endswith("wrote a.svg\nwrote a-gradients.svg\n")
        assert "Parameters, large -&gt; mixed" in (folder / "a.svg").read_text()
        assert "Gradients, large -&gt; mixed" in (folder / "a-gradients.svg").read_text()

    def test_parameters_are_cut_into_buckets(self) -> None:
        whole, cut = (
            switched("--from", "optimizer", "--to", "mixed", "--bucket-mb", size)["moves"][0] for size in ("25", "0.02")
        )
        assert len(whole["buckets"]) == 1 < len(cut["buckets"])
        assert [position for bucket in cut["buckets"] for position in bucket] == whole["buckets"][0]
        assert cut["total_bytes"] == whole["total_bytes"] and cut["messages"] > whole["messages"]
        assert max(cut["peak_extra_bytes"]) < max(whole["peak_extra_bytes"])


class TestSwitchFromTheFile:
    def test_nothing_but_a_pool_is_needed(self) -> None:
        text = answer(*SWITCH, "--from", "optimizer", "--to", "large", *TINY)
        assert text.startswith("4 ranks in one node (--cluster names others)\n\nParameters, optimizer -> large: ")

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (
                ["--from", "larg", "--to", "mixed"],
                "--from: no strategy 'larg' in the pool; there are large, mixed, small, and `optimizer` for the "
                "optimizer layout; did you mean 'large'?",
            ),
            (["--from", "mixed", "--to", "optimiser"], "--to: no strategy 'optimiser' in the pool; there are large"),
            (["--from", "mixed", "--to", "mixed"], "--from and --to: expected two layouts, got 'mixed' twice"),
            (["--from", "mixed", "--to", "large", "--picture", "a.png"], "--picture a.png: PNG is not there"),
            (
                ["--from", "mixed", "--to", "large", "--pool", "none.yaml"],
                "none.yaml: expected a file that can be read, got: No such file",
            ),
        ],
    )
    def test_bad_input(self, arguments: list[str], expected: str) -> None:
        assert message(*SWITCH, *arguments).startswith(f"Error: {expected}")

    @pytest.mark.usefixtures("compiled_once")
    def test_a_cluster_that_is_too_small(self) -> None:
        Path("one.yaml").write_text(TWO_NODES.replace("nodes: 2", "nodes: 1"))
        text = message(*SWITCH, "--from", "mixed", "--to", "large", "--cluster", "one.yaml", *TINY)
        assert text == "Error: --cluster one.yaml: expected 4 ranks or more, for ranks 0 to 3 take part; got 2\n"

    def test_options_that_are_missing_or_wrong(self) -> None:
        assert "Missing option '--to'" in message(*SWITCH, "--from", "mixed")
        assert "x>0" in message(*SWITCH, "--from", "mixed", "--to", "large", "--bucket-mb", "0")
        assert message("switch", "--from", "a", "--to", "b").startswith(
            "Error: expected --config RUN.yaml or --pool FILE"
        )


class TestSwitchReshards:
    """Layouts that are not one union: each part of a source or target is a tensor of its own."""

    UNION = Annotation.parse("0[] + 1[] @ S(0)")

    def strategy(self, name: str, *schemes: Scheme) -> Strategy:
        first, replicas = 0, []
        for scheme in schemes:
            count = sum(stage.num_ranks for stage in scheme.stages)
            replicas.append(Replica(scheme, tuple(range(first, first + count))))
            first += count
        return Strategy(name, tuple(replicas))

    def compiled(self, **held: Annotation) -> dict[str, Any]:
        return {
            text: SimpleNamespace(parameters={("w", 0): own}, gradients={("w", 0): own}) for text, own in held.items()
        }

    def pairs(self, start: Strategy | None, end: Strategy | None, kind: Any) -> list[tuple[str, str, str]]:
        single, union = Scheme((Stage(1),)), Scheme((Stage(2),))
        compiled = {str(single): Annotation.parse("0[]"), str(union): self.UNION}
        facts = SimpleNamespace(names=("w",), shape=(8, 3))
        captured = cast(Captured, SimpleNamespace(parameters=[facts], graph=SimpleNamespace(nodes=[])))
        found = switch_reshards(start, end, kind, self.compiled(**compiled), captured, 4)
        return [(reshard.name, str(reshard.source), str(reshard.target)) for reshard in found]

    def test_every_part_of_a_target_gets_its_copy(self) -> None:
        both = self.strategy("both", Scheme((Stage(1),)), Scheme((Stage(2),)))
        assert self.pairs(None, both, "parameters") == [
            ("w", "0-3[S(0)]", "0[]"),
            ("w..1", "0-3[S(0)]", "1[] + 2[] @ S(0)"),
        ]
        other = self.strategy("other", Scheme((Stage(2),)), Scheme((Stage(1),)))
        assert self.pairs(both, other, "parameters") == [("w", "0[]", "2[]"), ("w..1", "0[]", "0[] + 1[] @ S(0)")]

    def test_every_part_of_a_sum_goes_to_one_place(self) -> None:
        both = self.strategy("both", Scheme((Stage(1),)), Scheme((Stage(2),)))
        other = self.strategy("other", Scheme((Stage(2),)), Scheme((Stage(1),)))
        assert self.pairs(both, None, "gradients") == [
            ("w..1", "1[] + 2[] @ S(0)", "0-3[S(0)]"),
            ("w", "0[]", "0-3[S(0)]"),
        ]
        assert self.pairs(both, other, "gradients") == [("w..1", "1[] + 2[] @ S(0)", "2[]"), ("w", "0[]", "2[]")]


class TestWholeNodes:
    LINK = Link(1.0, 0.0)

    def test_nodes_that_take_no_part_are_left_out(self) -> None:
        topology = uniform("four", 4, 8, self.LINK, self.LINK, ranks_per_port=2)
        assert whole_nodes(topology, 9).num_ranks == 16
        assert whole_nodes(topology, 32) is topology


class TestExamples:
    @pytest.fixture(autouse=True)
    def repository(self, folder: Path) -> None:
        (folder / "examples").symlink_to(ROOT / "examples")

    def test_of_reshard(self) -> None:
        examples = examples_of("reshard")
        assert len(examples) >= 3
        assert all(answer(*example) for example in examples)

    @pytest.mark.long
    def test_of_switch(self) -> None:
        examples = examples_of("switch")
        assert len(examples) >= 3
        assert all(answer(*example) for example in examples)
