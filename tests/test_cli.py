"""The command line: `check`, `plan` and `dump` as a stranger meets them, from an empty folder."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from hgraph.errors import HydraulisError
from hgraph.plan import StepPlan
from hgraph.profile import Profile, SchemeCost
from hgraph.profile_file import ProfileFile, read_profile_file, write_profile_file
from runtime.cli import COMMANDS, main
from runtime.cli.options import load_run_config, make_model
from tests.command_line import POOL, ROOT, TINY, hgraph, message

PROFILE = Profile(
    {
        "tp2.pp2": SchemeCost(1e-5, 0.02, 2.0, 400),
        "tp2": SchemeCost(1e-5, 0.03, 1.0, 200),
        "tp1": SchemeCost(2e-5, 0.05, 0.5, 100),
    },
    {"large": 1.0, "mixed": 2.0, "small": 3.0},
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder that holds a pool and costs, nothing else; the test runs in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL)
    write_profile_file("costs.yaml", ProfileFile.of(PROFILE))
    return tmp_path


class TestGroup:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--help"],
            ["check", "pool.yaml"],
            ["plan", "--pool", "pool.yaml", "--profile", "costs.yaml", "--lengths", "90,20"],
            ["train", "--help"],
            ["verify", "--help"],
            ["plan", "--help"],
            ["dump", "--help"],
        ],
    )
    def test_what_needs_no_graphs_does_not_wait_for_torch(self, arguments: list[str]) -> None:
        code = (
            "import sys; from runtime.cli import main\n"
            f"main({arguments!r}, standalone_mode=False)\nassert 'torch' not in sys.modules, 'torch was imported'"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_help_lists_the_commands(self) -> None:
        text = hgraph("--help").stdout
        for name, what in COMMANDS.items():
            assert f"  {name}" in text and what in text

    def test_version(self) -> None:
        assert re.fullmatch(r"hgraph, version \d+\.\d+\.\d+\n", hgraph("--version").stdout)

    def test_unknown_command_names_the_nearest(self) -> None:
        result = hgraph("chekc")
        assert result.exit_code == 2
        known = ", ".join(COMMANDS)
        assert f"no command 'chekc'; the commands are {known}; did you mean 'check'?" in result.stderr

    def test_our_errors_are_one_message_and_with_debug_a_traceback(self) -> None:
        assert message("plan", "--pool", "pool.yaml", "--profile", "none.json", "--lengths", "3") == (
            "Error: none.json: expected a file that can be read, got: No such file or directory\n"
        )
        result = hgraph("--debug", "plan", "--pool", "pool.yaml", "--profile", "none.json", "--lengths", "3")
        assert isinstance(result.exception, HydraulisError)

    def test_errors_of_the_file_system_are_one_message_too(self, folder: Path) -> None:
        (folder / "taken").write_text("")
        options = ["--pool", "pool.yaml", "--profile", "costs.yaml", "--lengths", "3"]
        text = message("plan", *options, "--save-profile", "taken/costs.yaml")
        assert text == "Error: taken: expected a folder to write to, but taken is a file\n"

    def test_control_c_ends_with_130(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("runtime.cli.check.check_pool_file", interrupt)
        result = hgraph("check", "pool.yaml")
        assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def examples_of(name: str) -> list[list[str]]:
    """Returns the examples in the help of a command, as lists of arguments."""
    with click.Context(main) as context:
        command = main.get_command(context, name)
    assert command is not None and command.help is not None
    lines = [line.strip() for line in command.help.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("hgraph ")]


CALIBRATES = "--save-profile"


class TestExamples:
    @pytest.fixture(autouse=True)
    def repository(self, folder: Path) -> None:
        """Lets the examples find what they name, and costs so that only the one that measures has to."""
        (folder / "examples").symlink_to(ROOT / "examples")
        schemes = {
            "tp4": SchemeCost(1e-5, 0.02, 3.0, 4096),
            "tp2.pp2": SchemeCost(1e-5, 0.02, 3.0, 4096),
            "tp2": SchemeCost(1e-5, 0.04, 2.0, 2048),
            "tp1": SchemeCost(1e-5, 0.06, 1.0, 1024),
            "tp1.pp2(3,1)": SchemeCost(1e-5, 0.03, 1.0, 2048),
        }
        write_profile_file("costs.yaml", ProfileFile.of(Profile(schemes, {})))

    @pytest.mark.parametrize("name", ["check", "plan", pytest.param("dump", marks=pytest.mark.long)])
    def test_examples_of_help_run(self, name: str) -> None:
        examples = [example for example in examples_of(name) if CALIBRATES not in example]
        assert len(examples) >= 3
        for example in examples:
            result = hgraph(*example)
            assert result.exit_code == 0, f"{example}: {result.output}"
            assert result.stdout

    @pytest.mark.long
    def test_the_example_that_measures_runs(self) -> None:
        (example,) = (example for example in examples_of("plan") if CALIBRATES in example)
        result = hgraph(*example)
        assert result.exit_code == 0, result.output
        assert set(read_profile_file("costs.yaml").schemes) == {"tp4", "tp2.pp2", "tp2", "tp1", "tp1.pp2(3,1)"}


class TestCheck:
    def test_a_sound_file(self) -> None:
        result = hgraph("check", "pool.yaml")
        assert result.exit_code == 0
        assert "pool.yaml: no problems; strategies: 3, ranks: 4" in result.stdout
        assert re.search(r"mixed +│ tp2 \+ 2 x tp1 +│ 0-1 \| 2 \| 3 +│ -", result.stdout)

    def test_idle_ranks_are_notes_and_refused_by_option(self) -> None:
        assert "note: line 8: strategies[2]" in hgraph("check", "pool.yaml").stdout
        result = hgraph("check", "pool.yaml", "--refuse-idle")
        assert result.exit_code == 1
        assert "pool.yaml: 1 problem\n  pool.yaml: line 8: strategies[2]" in result.stdout

    def test_json(self) -> None:
        data = json.loads(hgraph("check", "pool.yaml", "--json").stdout)
        assert data["ok"] and data["ranks"] == 4 and data["problems"] == []
        assert data["strategies"][1]["replicas"][0] == {"scheme": "tp2", "ranks": [0, 1]}
        assert data["strategies"][2]["idle_ranks"] == [3]
        Path("bad.yaml").write_text(POOL.replace("tp: 2, pp", "tp: 0, pp"))
        result = hgraph("check", "bad.yaml", "--json")
        assert result.exit_code == 1
        (problem,) = json.loads(result.stdout)["problems"]
        assert (problem["line"], problem["key"]) == (5, "strategies[0].replicas[0].tp")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "line 1: expected a mapping, got an empty file"),
            ("version: 1\nranks: [4\n", "YAML syntax, column"),
            (POOL.replace("count: 3", "ranks: [[0], [0]]"), "rank 0 is in replicas[0].ranks[0][0] already"),
            (POOL.replace("template", "x").replace("ranks: 4", "rank: 4"), "rank: unknown key"),
        ],
    )
    def test_bad_files(self, text: str, expected: str) -> None:
        Path("bad.yaml").write_text(text)
        result = hgraph("check", "bad.yaml")
        assert result.exit_code == 1
        assert result.stdout.startswith("bad.yaml: ") and expected in result.stdout
        assert result.stderr == ""

    def test_no_file(self) -> None:
        assert message("check") == (
            "Error: expected a strategy file: hgraph check FILE, or hgraph check --config RUN.yaml\n"
        )
        assert "none.yaml: expected a file that can be read" in message("check", "none.yaml")
        assert "expected one file, got 'b.yaml' as well" in message("check", "a.yaml", "b.yaml")

    def test_with_a_model(self) -> None:
        Path("run.yaml").write_text("pool: pool.yaml\n")
        result = hgraph("check", "--config", "run.yaml", *TINY)
        assert result.exit_code == 0, result.output
        Path("big.yaml").write_text(POOL.replace("tp: 2, pp: 2", "tp: 1, pp: 4"))
        result = hgraph("check", "big.yaml", "--config", "run.yaml", *TINY)
        assert result.exit_code == 1
        assert "big.yaml: line 5: strategies[0].replicas[0].pp: expected" in result.stdout

    def test_what_a_configuration_says_of_the_pool(self) -> None:
        Path("run.yaml").write_text(
            "pool: pool.yaml\nnum_processes: 2\nplanner: {only: mixt}\n"
            "memory: {budget_mib: null, max_tokens: {tp3: 5}}\n"
        )
        result = hgraph("check", "--config", "run.yaml", *TINY)
        assert result.exit_code == 1
        for text in (
            "ranks: the configuration has num_processes: 2, the pool has ranks: 4",
            "planner.only: no strategy 'mixt' in the pool; did you mean 'mixed'?",
            "memory.max_tokens: no scheme 'tp3' in the pool; did you mean",
            "memory.max_tokens: no budget_mib, and no limit for tp2.pp2",
        ):
            assert text in result.stdout


PLAN = ("plan", "--pool", "pool.yaml", "--profile", "costs.yaml")


class TestPlan:
    def test_tables(self) -> None:
        text = hgraph(*PLAN, "--lengths", "150,3x40").stdout
        assert "4 sequences, 270 tokens, the longest 150; 3 strategies on 4 ranks; costs from costs.yaml" in text
        assert re.search(r"> │ mixed +│ +[\d.]+ │ +[\d.]+ │ +[\d.]+% │ taken: smallest predicted time", text)
        assert re.search(
            r"small +│ +- │ +- │ +- │ cannot hold sequence 0 of 150 tokens: its largest limit is 100", text
        )
        assert "Replicas of mixed" in text
        assert re.search(r"0 \(slowest\) │ tp2 +│ 0-1 +│ 1: 150 +│ +1 │ +150 │ +[\d.]+ │ sequence 0: 150 tokens", text)
        assert re.search(r"predicted [\d.]+ ms, bridges included; lower bound of the pool [\d.]+ ms, gap [\d.]+%", text)

    def test_idle_replicas_are_shown(self) -> None:
        text = hgraph(*PLAN, "--lengths", "150", "--strategy", "mixed").stdout
        assert re.search(r"2 +│ tp1 +│ 3 +│ none +│ +0 │ +0 │ +0\.0 │ idle", text)
        assert "\nidle ranks: 2 of 4: 2-3 in replicas without a sequence\n" in text

    @pytest.mark.case(68)
    def test_idle_ranks_are_named_and_refused_by_option(self) -> None:
        text = hgraph(*PLAN, "--lengths", "90,20", "--strategy", "small").stdout
        assert "\nranks in no replica of a strategy: 3 in small\n" in text
        assert "\nidle ranks: 2 of 4: 3 in no replica of small, 2 in replicas without a sequence\n" in text
        data = json.loads(hgraph(*PLAN, "--lengths", "90,20", "--json").stdout)
        assert data["strategy"] == "mixed" and len(data["idle_ranks"]) >= 1
        assert [(row["strategy"], row["idle_ranks"]) for row in data["candidates"]] == [
            ("large", []),
            ("mixed", []),
            ("small", [3]),
        ]
        text = hgraph(*PLAN, "--lengths", "90,20,30", "--refuse-idle").stdout
        assert "no replica of" not in text and "│ small" not in text
        assert message(*PLAN, "--lengths", "90,20", "--strategy", "small", "--refuse-idle") == (
            "Error: plan: expected a strategy that uses all 4 ranks (require_all_ranks), got none; small comes closest "
            "and leaves [3] idle. Add a replica to it, or allow idle ranks\n"
        )

    def test_json_holds_the_plan(self) -> None:
        data = json.loads(hgraph(*PLAN, "--lengths", "150,3x40", "--json").stdout)
        plan = StepPlan.from_json(json.dumps(data["plan"]))
        assert plan.strategy == data["strategy"] == "mixed"
        assert data["lengths"] == [150, 40, 40, 40]
        assert data["replicas"][0]["micro_batches"] == [[0]]
        assert [row["strategy"] for row in data["candidates"]] == ["large", "mixed", "small"]
        assert data["max_tokens"] == {"tp2.pp2": 400, "tp2": 200, "tp1": 100}

    def test_lengths_of_a_file(self) -> None:
        for text in ("[150, 40, 40, 40]", '{"lengths": [150, 40, 40, 40]}'):
            Path("lengths.json").write_text(text)
            data = json.loads(hgraph(*PLAN, "--lengths-file", "lengths.json", "--json").stdout)
            assert data["lengths"] == [150, 40, 40, 40]

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ([], "expected the lengths of the sequences: --lengths 100,2000,20x300 or --lengths-file F.json"),
            (
                ["--lengths", "-5,3"],
                "--lengths: item 1: expected a length of 1 token or more, or COUNTxLENGTH, got '-5'",
            ),
            (["--lengths", "3,0"], "--lengths: item 2: expected a length of 1 token or more, or COUNTxLENGTH, got '0'"),
            (["--lengths", ""], "--lengths: item 1: expected a length of 1 token or more, or COUNTxLENGTH, got ''"),
            (["--lengths", "0x7"], "--lengths: expected at least one sequence, got '0x7'"),
            (["--lengths", "9,401"], "plan: sequence 1 has 401 tokens; the largest limit of the pool is 400 tokens"),
            (
                ["--lengths", "9", "--strategy", "mixt"],
                "no strategy 'mixt' in the pool; there are large, mixed, small; did",
            ),
            (["--lengths-file", "none.json"], "none.json: expected a file that can be read"),
        ],
    )
    def test_bad_lengths(self, arguments: list[str], expected: str) -> None:
        text = message(*PLAN, *arguments)
        assert text.startswith(f"Error: {expected}")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "f.json: line 1: expected JSON, got an empty file"),
            ("[1,\n 2", "f.json: line 2: JSON syntax, column 3: "),
            ("{}", "f.json: expected a list of lengths such as [100, 2000]"),
            ("[]", "f.json: expected a list of lengths such as [100, 2000]"),
            ("[5, -2]", "f.json: item 2: expected a length of 1 token or more, got -2"),
            ("[5, 2.5]", "f.json: item 2: expected a length of 1 token or more, got 2.5"),
            ("[true]", "f.json: item 1: expected a length of 1 token or more, got True"),
        ],
    )
    def test_bad_files_of_lengths(self, text: str, expected: str) -> None:
        Path("f.json").write_text(text)
        assert expected in message(*PLAN, "--lengths-file", "f.json")

    def test_costs_that_lack_a_scheme(self) -> None:
        write_profile_file("costs.yaml", ProfileFile.of(Profile({"tp2": PROFILE.schemes["tp2"]}, {})))
        assert message(*PLAN, "--lengths", "9") == "Error: profile: no cost for scheme tp2.pp2; it has ['tp2']\n"

    def test_nothing_given(self) -> None:
        assert message("plan", "--lengths", "9").startswith("Error: expected --config RUN.yaml or --pool FILE")

    def test_bad_settings(self) -> None:
        text = message("plan", "--pool", "pool.yaml", "--lengths", "9", "model.layrs=2")
        assert "override 1: model.layrs: unknown key" in text and "did you mean 'layers'?" in text

    def test_without_costs_they_are_measured_once_and_kept(self, folder: Path) -> None:
        Path("two.yaml").write_text("version: 1\nranks: 2\nstrategies: [{name: one, replicas: [{tp: 2}]}]\n")
        short = "calibration.lengths=[2, 4, 8]"
        arguments = ["plan", "--pool", "two.yaml", "--lengths", "9,5", *TINY, short, "memory.max_tokens={tp2: 12}"]
        first = hgraph(*arguments, "--save-profile", "saved.yaml")
        assert first.exit_code == 0, first.output
        assert "costs measured just now on simulated ranks, kept in .cache/hydraulis" in first.stdout
        assert list((folder / ".cache" / "hydraulis").iterdir())
        second = hgraph(*arguments)
        assert "costs measured before, from .cache/hydraulis" in second.stdout
        assert read_profile_file("saved.yaml").schemes["tp2"].max_tokens == 12


class TestFactory:
    """A model of the user's own, from the current folder."""

    @staticmethod
    def make(source: str, module: str, *settings: str) -> object:
        Path(f"{module}.py").write_text(source)
        return make_model(load_run_config(None, "pool.yaml", [f"model.factory={module}:make", *settings]))

    def test_arguments_are_given(self) -> None:
        source = "from torch import nn\ndef make(width):\n    return nn.Linear(width, 2)\n"
        model = self.make(source, "factory_a", "model.arguments={width: 3}")
        assert "in_features=3" in str(model)

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("def mkae(): pass\n", r"has no function 'make'; it has mkae"),
            ("def make(): return 3\n", r"expected an nn.Module, got int"),
            ("def make(): raise RuntimeError('no weights')\n", r"make\(\) failed: RuntimeError: no weights"),
            (
                "import nothing_of_the_kind\n",
                r"importing factory_\w+ failed: ModuleNotFoundError: No module named 'noth",
            ),
            ("def make(:\n", r"importing factory_\w+ failed: SyntaxError"),
        ],
    )
    def test_faults(self, source: str, expected: str, request: pytest.FixtureRequest) -> None:
        with pytest.raises(HydraulisError, match=expected):
            self.make(source, f"factory_{abs(hash(request.node.name))}")

    def test_no_module(self) -> None:
        with pytest.raises(HydraulisError, match="there is no module 'absent_module' in .* start from the folder"):
            make_model(load_run_config(None, "pool.yaml", ["model.factory=absent_module:make"]))

    def test_weights_follow_the_seed_and_torch_is_left_alone(self) -> None:
        import torch

        before = torch.random.get_rng_state()
        first, same, other = (
            make_model(load_run_config(None, "pool.yaml", [*TINY, f"seed={seed}"])).state_dict() for seed in (1, 1, 2)
        )
        assert torch.equal(torch.random.get_rng_state(), before)
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert not torch.equal(first["head.weight"], other["head.weight"])
