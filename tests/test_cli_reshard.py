"""`hgraph reshard` as a stranger meets it; its figures against the plans."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hgraph.annotation import Annotation
from hgraph.errors import PlanError
from hgraph.reshard import lower_bound_elements, plan_reshard, reshard_bytes
from hgraph.reshard_plan import Collective, Move
from hgraph.reshard_text import held_texts, operation_text
from tests.command_line import POOL, ROOT, TWO_NODES, answer, hgraph, message
from tests.test_cli import examples_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder that holds a pool and a cluster, nothing else; the test runs in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL)
    (tmp_path / "two.yaml").write_text(TWO_NODES)
    return tmp_path


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


class TestExamples:
    def test_of_reshard(self, folder: Path) -> None:
        (folder / "examples").symlink_to(ROOT / "examples")
        examples = examples_of("reshard")
        assert len(examples) >= 3
        assert all(answer(*example) for example in examples)
