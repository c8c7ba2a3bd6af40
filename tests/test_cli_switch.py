"""`hgraph switch` as a stranger meets it; its figures against the plans."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import numpy
import pytest
import torch

from hgraph.annotation import Annotation
from hgraph.bridge_plan import plan_bridge
from hgraph.bundles import TensorReshard
from hgraph.capture import Captured
from hgraph.check_reshard import check_reshard
from hgraph.reshard import reshard_bytes
from hgraph.strategy import Pool, Replica, Scheme, Stage, Strategy
from hgraph.topology import Link, uniform
from hgraph.topology_file import load_topology
from passes.pipelines import CompiledScheme
from runtime.bridge import Bridge
from runtime.bridge_planner import BridgePlanner
from runtime.cli.options import load_run_config
from runtime.cli.switch import _inputs as make_inputs
from runtime.cli.traffic_report import whole_nodes
from runtime.layouts import switch_reshards
from tests.command_line import POOL, ROOT, TINY, TWO_NODES, answer, message
from tests.test_cli import examples_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder that holds a pool and a cluster, nothing else; the test runs in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL)
    (tmp_path / "two.yaml").write_text(TWO_NODES)
    return tmp_path


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
        inward, outward = BridgePlanner(compiled, captured, 4, dtypes, 0.02, topology).plans(strategy)
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

    @pytest.mark.long
    def test_of_switch(self) -> None:
        examples = examples_of("switch")
        assert len(examples) >= 3
        assert all(answer(*example) for example in examples)
