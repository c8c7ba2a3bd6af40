"""What `hgraph dump` writes: texts, groups of a graph, pictures."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hgraph.annotation import Annotation
from hgraph.capture import Captured, capture
from hgraph.graph import info
from hgraph.pictures import PictureGraph
from hgraph.strategy import Override, Scheme, Stage
from passes.insert_comm import is_reshard
from passes.pipelines import PASSES, CompiledScheme, compile_scheme, normalized
from runtime.cli import main
from runtime.config import ModelConfig
from runtime.dumps import FORMATS, folder_names, schedule_files, scheme_files
from runtime.dumps.communication import LOCAL, reshard_text, words_of_reshard
from runtime.dumps.groups import groups_of, runs_here
from runtime.dumps.pictures import PHASES, scheme_picture, stage_picture
from runtime.models.build import build_model, llama_loss

PIPELINE = Scheme.uniform(tp=2, pp=2)
UNEQUAL = Scheme((Stage(3, 1), Stage(1, 1)), overrides=(Override("layers.0.mlp", "0-1[S(2)] + 2[] @ S(1)"),))
SIZES = {"vocab_size": 67, "hidden": 24, "layers": 2, "heads": 6, "kv_heads": 3, "ffn": 20}
SETTINGS = [f"model.{name}={size}" for name, size in {**SIZES, "vocab_size": 300}.items()] + ["data.vocab_size=300"]
POOL = """\
version: 1
ranks: 4
strategies:
  - name: pipeline
    replicas: [{tp: 2, pp: 2}]
  - name: mixed
    replicas: [{tp: 2, schedule: gpipe}, {tp: 1}]
"""


@pytest.fixture(scope="module")
def captured() -> Captured:
    model = build_model(ModelConfig(**SIZES), on_meta=True)
    return normalized(capture(model, llama_loss))


@pytest.fixture(scope="module")
def pipeline(captured: Captured) -> CompiledScheme:
    return compile_scheme(captured, PIPELINE)


@pytest.fixture(scope="module")
def unequal(captured: Captured) -> CompiledScheme:
    return compile_scheme(captured, UNEQUAL)


class TestCommunication:
    @pytest.mark.parametrize(
        ("source", "target", "shape", "words"),
        [
            ("0-1[P]", "0-1[R]", (4, 6), "all-reduce"),
            ("0-1[P]", "0-1[S(0)]", (4, 6), "reduce-scatter"),
            ("0-1[S(0)]", "0-1[R]", (4, 6), "all-gather"),
            ("0-3[S(0)]", "0-3[S(1)]", (4, 8), "all-to-all"),
            ("0-1[R]", "2-3[R]", (4, 6), "send/recv"),
            ("0-1[R]", "0-1[S(0)]", (4, 6), LOCAL),
        ],
    )
    def test_words(self, source: str, target: str, shape: tuple[int, ...], words: str) -> None:
        assert words_of_reshard(Annotation.parse(source), Annotation.parse(target), shape) == words


class TestGroups:
    @pytest.mark.parametrize("full", [False, True])
    def test_every_operator_is_in_one_group_after_what_it_reads(self, pipeline: CompiledScheme, full: bool) -> None:
        for stage in pipeline.stages:
            for phase in PHASES:
                graph = stage.graphs.graph(phase)
                groups = groups_of(graph, full=full)
                nodes = [node for group in groups for node in group.nodes]
                assert Counter(nodes) == Counter(node for node in graph.nodes if runs_here(node))
                position = {node: index for index, group in enumerate(groups) for node in group.nodes}
                for node in nodes:
                    assert all(position[one] <= position[node] for one in node.all_input_nodes if one in position)

    def test_a_module_is_one_group_unless_others_run_between(self, pipeline: CompiledScheme) -> None:
        groups = groups_of(pipeline.stages[0].graphs.forward)
        modules = Counter(group.module for group in groups if not group.is_reshard)
        assert modules["layers.0.attention"] == modules["layers.0.attention.o_proj"] == modules["layers.0.mlp"] == 1
        assert modules["layers.0"] == 2, "x + attention(x), then x + mlp(x)"

    def test_a_view_of_what_was_communicated_belongs_to_the_communication(self, pipeline: CompiledScheme) -> None:
        groups = groups_of(pipeline.stages[0].graphs.forward)
        after = [
            group for group in groups if group.is_reshard and info(group.nodes[0]).module == "layers.0.attention.o_proj"
        ]
        assert [len(group.nodes) for group in after] == [2]


def hexagons(picture: PictureGraph) -> list[str]:
    return [node.label for node in picture.nodes if node.fill_class == "communication"]


class TestPictures:
    def test_clusters_stand_by_stage_and_phase(self, pipeline: CompiledScheme, captured: Captured) -> None:
        picture = scheme_picture(pipeline, captured.num_layers)
        assert [(c.title, c.column, c.row) for c in picture.clusters] == [
            ("stage 0 forward: ranks 0-1, 1 layer", 0, 0),
            ("stage 0 backward: ranks 0-1, 1 layer", 0, 1),
            ("stage 1 forward: ranks 2-3, 1 layer", 1, 0),
            ("stage 1 backward: ranks 2-3, 1 layer", 1, 1),
        ]
        one_stage = compile_scheme(captured, Scheme.uniform(tp=2))
        picture = scheme_picture(one_stage, captured.num_layers)
        assert [(c.column, c.row) for c in picture.clusters] == [(0, 0), (1, 0)]

    @pytest.mark.parametrize("full", [False, True])
    def test_every_communication_is_shown(self, unequal: CompiledScheme, captured: Captured, full: bool) -> None:
        picture = scheme_picture(unequal, captured.num_layers, full=full)
        expected = Counter(f"send/recv: from stage {transfer.sender}" for transfer in unequal.transfers)
        for stage in unequal.stages:
            for phase in PHASES:
                reshards = [node for node in stage.graphs.graph(phase).nodes if is_reshard(node)]
                expected.update(words for node in reshards if (words := reshard_text(node)[0]) != LOCAL)
        assert Counter(hexagons(picture)) == expected
        assert all(node.shape == "hexagon" for node in picture.nodes if node.fill_class == "communication")

    def test_messages_join_the_stages(self, pipeline: CompiledScheme, captured: Captured) -> None:
        picture = scheme_picture(pipeline, captured.num_layers)
        cluster = {node.id: node.cluster for node in picture.nodes}
        messages = [(cluster[e.source], cluster[e.target]) for e in picture.edges if e.style == "message"]
        assert messages == [("s0f", "s1f"), ("s1b", "s0b")]

    def test_a_node_tells_module_parameters_and_result(self, pipeline: CompiledScheme, captured: Captured) -> None:
        picture = scheme_picture(pipeline, captured.num_layers)
        nodes = {(node.cluster, node.label): node for node in picture.nodes}
        node = nodes["s0f", "layers.0.attention.q_proj"]
        assert node.sublabel.splitlines() == ["Linear", "weight [24, 24] 0-1[S(0:16,8)]", "→ [1, T, 24] 0-1[S(2:16,8)]"]
        assert node.fill_class == "shard2"
        node = nodes["s0b", "layers.0.attention.q_proj"]
        assert node.sublabel.splitlines() == ["Linear", "→ [1, T, 24] 0-1[P]", "grad of weight 0-1[S(0:16,8)]"]
        assert node.fill_class == "partial"
        assert nodes["s0f", "all-reduce"].sublabel.splitlines()[0] == "0-1[P] -> 0-1[R]"

    def test_backward_names_what_it_keeps_from_forward(self, pipeline: CompiledScheme, captured: Captured) -> None:
        picture = scheme_picture(pipeline, captured.num_layers)
        label = {node.id: (node.cluster, node.label) for node in picture.nodes}
        kept = {(label[e.source], label[e.target]) for e in picture.edges if e.style == "reference"}
        assert (("s0f", "layers.0.attention.k_proj"), ("s0b", "layers.0.attention.k_proj")) in kept

    def test_a_stage_alone_shows_what_it_sends(self, pipeline: CompiledScheme, captured: Captured) -> None:
        picture = stage_picture(pipeline, captured.num_layers, 0, "forward")
        assert [c.id for c in picture.clusters] == ["s0f"]
        assert hexagons(picture)[-1] == "to stage 1"

    def test_full_has_every_operator(self, pipeline: CompiledScheme, captured: Captured) -> None:
        picture = scheme_picture(pipeline, captured.num_layers, full=True)
        count = sum(
            runs_here(node) for s in pipeline.stages for phase in PHASES for node in s.graphs.graph(phase).nodes
        )
        boxes = [node for node in picture.nodes if node.shape != "pill" and "from stage" not in node.label]
        assert len(boxes) == count
        labels = {node.label for node in picture.nodes}
        assert {"mm", "packed_attention", "layers.0.mlp.up_proj.weight"} <= labels


class TestFiles:
    def test_names(self, pipeline: CompiledScheme, captured: Captured) -> None:
        graphs = ["graph", *(f"stage{stage}-{phase}" for stage in (0, 1) for phase in PHASES)]
        files = scheme_files(pipeline, captured, 4)
        pictures = {f"{name}.{kind}" for name in graphs for kind in ("dot", "svg")}
        programs = {name for name in files if name.endswith(".py")}
        texts = {"summary.txt", "schedule.txt", *(f"{name}.txt" for name in graphs)}
        assert set(files) == pictures | programs | texts | {"schedule.svg"}
        assert "stage0-forward-ranks-0.py" in programs, "three heads of keys over two ranks: two shape classes"
        for name, text in files.items():
            if name.endswith(".svg"):
                ElementTree.fromstring(text)
            if name.endswith(".py"):
                compile(text, name, "exec")

    def test_formats(self, pipeline: CompiledScheme, captured: Captured) -> None:
        for kind, endings in (("dot", {".dot"}), ("svg", {".svg"}), ("text", {".txt", ".py"})):
            assert {Path(name).suffix for name in scheme_files(pipeline, captured, 4, formats=[kind])} == endings

    def test_summary(self, unequal: CompiledScheme, captured: Captured) -> None:
        text = scheme_files(unequal, captured, 4, formats=["text"])["summary.txt"]
        lines = text.splitlines()
        assert lines[0].startswith(
            "scheme tp3+tp1(1,1)[layers.0.mlp=0-1[S(2)] + 2[] @ S(1)]: 4 ranks, 2 stages, schedule"
        )
        for line in (
            "0      0-2    1       6         2 x all-reduce + 1 x reduce-scatter  2 x all-reduce",
            "1      3      1       2         nothing                              nothing",
            "layers.0.attention.q_proj.weight  0      [24, 24]  0-2[S(0)]  0-2[S(0)]",
        ):
            assert line in lines
        assert all(line == line.rstrip() for line in lines)

    def test_schedule(self, pipeline: CompiledScheme) -> None:
        files = schedule_files(pipeline, 3, FORMATS)
        assert files["schedule.txt"] == (
            "a forward pass takes one unit of time, a backward pass two, messages none\n"
            "\n"
            "1f1b: 2 stages, 3 micro-batches, 25% idle\n"
            "        |0                                 12|\n"
            "stage 0 |F0=F1=......B0----F2=B1----...B2----|  25% idle\n"
            "stage 1 |...F0=B0----F1=B1----F2=B2----......|  25% idle\n"
            "\n"
            "1f1b stages=2 micro_batches=3\n"
            "0: 0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0F2 0SF2>1 0RB1<1 0B1 0RB2<1 0B2\n"
            "1: 1RF0<0 1F0 1B0 1SB0>0 1RF1<0 1F1 1B1 1SB1>0 1RF2<0 1F2 1B2 1SB2>0\n"
        )
        assert "nothing to do" in schedule_files(pipeline, 0, ["text"])["schedule.txt"]

    def test_folders_have_plain_and_distinct_names(self) -> None:
        other = Scheme((Stage(3, 1), Stage(1, 1)), overrides=(Override("layers.1.mlp", "3[]"),))
        schemes = [PIPELINE, Scheme.uniform(pp=2, layers=(3, 1)), UNEQUAL, other, Scheme.uniform(schedule="gpipe")]
        assert list(folder_names(schemes).values()) == [
            "tp2.pp2",
            "tp1.pp2-3-1",
            "tp3+tp1-1-1-overrides",
            "tp3+tp1-1-1-overrides-2",
            "tp1-gpipe",
        ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL)
    return tmp_path


def dump(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["dump", "--pool", "pool.yaml", *arguments], prog_name="hgraph")


class TestCommand:
    def test_folders_of_the_pool(self, folder: Path) -> None:
        result = dump("--out", "out", *SETTINGS, "memory.max_tokens={tp1: 77}")
        assert result.exit_code == 0, result.output
        assert sorted(path.name for path in (folder / "out").iterdir()) == [
            "strategies.svg",
            "strategies.txt",
            "tp1",
            "tp2-gpipe",
            "tp2.pp2",
        ]
        lines = (folder / "out" / "strategies.txt").read_text().splitlines()
        assert lines[:3] == [
            "2 strategies on 4 ranks",
            "",
            "strategy  replicas         ranks    idle ranks  tokens per micro-batch",
        ]
        assert lines[5].startswith("mixed     tp2:gpipe + tp1  0-1 | 2  3           ") and lines[5].endswith(" | 77")
        assert "tp2-gpipe" in result.stdout

    def test_the_same_bytes_whatever_the_hash_seed(self, folder: Path) -> None:
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "runtime.cli", "dump", "--pool", "pool.yaml", "--out", f"out{seed}", *SETTINGS],
                env={**os.environ, "PYTHONHASHSEED": seed},
                stdout=subprocess.DEVNULL,
            )
            for seed in ("1", "2")
        ]
        assert [process.wait() for process in running] == [0, 0]
        first = {path.relative_to("out1"): path.read_bytes() for path in Path("out1").rglob("*.*") if path.is_file()}
        second = {path.relative_to("out2"): path.read_bytes() for path in Path("out2").rglob("*.*") if path.is_file()}
        assert first == second and len(first) > 20
        here = str(Path(__file__).parent.parent).encode()
        assert not [path for path, content in first.items() if here in content], "no path of this machine in a dump"

    def test_after_a_pass_to_stdout(self, folder: Path) -> None:
        result = dump("--strategy", "mixed", "--dump-after", "normalize", "--dump-after", "split_vocabulary", *SETTINGS)
        assert result.exit_code == 0, result.output
        heads = [line for line in result.stdout.splitlines() if line.startswith("# ")]
        assert heads == [
            "# all schemes, after normalize",
            "# tp2:gpipe, after split_vocabulary",
            "# tp1, after split_vocabulary",
        ]
        assert "split_vocabulary does not run: every stage has one rank" in result.stdout
        assert "%embedding: float32[1, T, 24] {} = aten.embedding.default" in result.stdout

    def test_after_every_pass_to_files(self, folder: Path) -> None:
        options = [part for name in PASSES for part in ("--dump-after", name)]
        result = dump("--strategy", "pipeline", "--out", "out", *options, *SETTINGS)
        assert result.exit_code == 0, result.output
        written = sorted(str(path.relative_to("out")) for path in Path("out").rglob("*.txt"))
        expected = [f"tp2.pp2/after-{number}-{name}.txt" for number, name in enumerate(PASSES) if number]
        assert written == ["after-0-normalize.txt", *expected]
        text = Path("out/tp2.pp2/after-5-split_stages.txt").read_text()
        assert [line for line in text.splitlines() if line.startswith("stage ")] == [
            "stage 0 forward",
            "stage 0 backward",
            "stage 1 forward",
            "stage 1 backward",
        ]
        assert "def run(inputs, communicate, deliver):" in Path("out/tp2.pp2/after-6-specialize.txt").read_text()

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ([], "expected --out FOLDER for the files, or --dump-after PASS to print the text after a pass"),
            (
                ["--dump-after", "deduct"],
                f"--dump-after: no pass 'deduct'; the passes are {', '.join(PASSES)}; did you mean 'deduce'?",
            ),
            (["--out", "o", "--format", "txt"], "--format: expected a list of text, dot, svg, got 'txt'; did you mean"),
            (["--out", "o", "--format", ","], "--format: expected a list of text, dot, svg, got nothing"),
            (["--out", "o", "--micro-batches", "-1"], "--micro-batches: expected a number of 0 or more, got -1"),
            (
                ["--out", "o", "--strategy", "pipelin"],
                "no strategy 'pipelin' in the pool; there are pipeline, mixed; did",
            ),
            (["--out", "o", "--pool", "none.yaml"], "none.yaml: expected a file that can be read, got: No such file"),
            (["--out", "pool.yaml/x"], "pool.yaml/x: expected a folder to write to, but pool.yaml is a file"),
        ],
    )
    def test_bad_input(self, folder: Path, arguments: list[str], expected: str) -> None:
        result = dump(*arguments)
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
        assert result.stderr.startswith(f"Error: {expected}")
        assert result.stdout == ""
        assert sorted(os.listdir()) == ["pool.yaml"]
