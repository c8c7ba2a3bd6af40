"""`hgraph profile`: what is run, how it is fitted, what the error says, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from hgraph.graph import BOUNDARIES, TOKENS
from hgraph.model_facts import ModelFacts
from hgraph.profile_file import read_profile_file
from hgraph.strategy import Scheme, Strategy
from runtime import measure
from runtime.calibrate import MemoryLimits, max_tokens_of, profile_of
from runtime.live_bytes import LiveBytes, watched
from runtime.measure import Sampling, _Watch, measure_peaks, num_runs, shapes_to_check, shapes_to_fit
from runtime.memory import optimizer_bytes, scheme_memory
from runtime.profiler import pool_of_all_schemes
from runtime.program import Program
from runtime.requests import AllReduce, RankGenerator
from tests.command_line import TINY, answer, message
from tests.models import gpt, language_loss
from tests.small_pools import exact_program, pool, strategy

U = Scheme.uniform
MIXED = pool(3, strategy("mixed", U(1, 2), U()), strategy("two", U(2)))


class TestShapes:
    def test_what_is_fitted_and_what_is_held_out(self) -> None:
        assert shapes_to_fit((32, 128, 512), 1000, None) == [(32,), (128,), (512,), (32,) * 16]
        held_out = shapes_to_check((32, 128, 512), 1000, None)
        assert held_out == [(64,), (256,), (128,) + (32,) * 6]

    def test_limits_cut_both(self) -> None:
        assert shapes_to_fit((32, 128, 512), 40, None) == [(10,), (20,), (32,), (40,), (10,) * 4]
        assert all(sum(shape) <= 40 for shape in shapes_to_check((32, 128, 512), 40, None))
        assert max(map(max, shapes_to_check((32, 128, 512), 1000, 100))) <= 100
        assert shapes_to_fit((8, 16, 32), 1, None) == [(1,)] and shapes_to_check((8, 16, 32), 1, None) == []

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 50, 513])
    def test_nothing_is_in_both(self, limit: int) -> None:
        fitted, held_out = (own((32, 128, 512), limit, 300) for own in (shapes_to_fit, shapes_to_check))
        assert not set(fitted) & set(held_out)
        assert len(held_out) == len(set(held_out))


class TestAllSchemes:
    def test_every_product_that_divides(self) -> None:
        made = pool_of_all_schemes(4, None)
        assert [str(own.replicas[0].scheme) for own in made.strategies] == [
            "tp1",
            "tp1.pp2",
            "tp1.pp4",
            "tp2",
            "tp2.pp2",
            "tp4",
        ]
        assert [own.name for own in made.strategies][:3] == ["tp1 x4", "tp1.pp2 x2", "tp1.pp4"]
        assert all(own.ranks == (0, 1, 2, 3) for own in made.strategies)

    def test_the_model_bounds_both(self) -> None:
        made = pool_of_all_schemes(4, ModelFacts(num_layers=2, num_query_heads=2, parameter_names=()))
        assert [str(own.replicas[0].scheme) for own in made.strategies] == ["tp1", "tp1.pp2", "tp2", "tp2.pp2"]


class TestLiveBytes:
    def test_results_count_while_something_refers_to_them(self) -> None:
        given = torch.ones(1000)
        counter = LiveBytes()
        with counter:
            first = given + 1
            second = first * 2
            assert counter.live_bytes == 8000
            del first
            assert counter.live_bytes == 4000
            third = second.view(10, 100)
            third.add_(1)
            given.mul_(2)
            assert counter.live_bytes == 4000, "neither views, nor what is changed in place, nor what was there"
            del second
            assert counter.live_bytes == 4000, "the view still holds it"
            del third
        assert (counter.live_bytes, counter.peak_bytes) == (0, 8000)

    def test_only_what_a_rank_computes_itself_counts(self) -> None:
        def rank() -> RankGenerator[int]:
            own = torch.zeros(10) + 1
            got = yield AllReduce((0, 1), own, "sum", "test")
            return int((got + own).sum())

        counter = LiveBytes()
        generator = watched(rank(), counter)
        next(generator)
        torch.zeros(1000) + 1
        with pytest.raises(StopIteration) as end:
            generator.send(torch.ones(10))
        assert end.value.value == 20
        assert counter.peak_bytes == 4 * (10 + 10 + 1), "own, its sum with the other's, and the number that it ends in"


def test_a_watch_adds_up_what_a_rank_computes_not_what_it_waits() -> None:
    now = [0.0]

    def rank() -> RankGenerator[str]:
        now[0] += 3
        yield AllReduce((0, 1), torch.zeros(1), "sum", "test")
        now[0] += 4
        return "done"

    watch = _Watch(lambda: now[0])
    generator = watch.watched(rank(), 5)
    next(generator)
    now[0] += 100
    with pytest.raises(StopIteration) as end:
        generator.send(torch.zeros(1))
    assert end.value.value == "done"
    assert (watch.busy_s, watch.start_s, watch.end_s) == ({5: 7.0}, 0.0, 107.0)


COSTS = {"tp1": (3e-5, 0.02, 1.5), "tp1.pp2": (1e-5, 0.01, 0.5), "tp2": (2e-5, 0.0, 2.0)}


def made_up(bias: float = 1.0, wild: Random | None = None) -> object:
    """Returns what stands for a run: exact costs, points held out off by `bias`; one run in seven wild by chance."""

    def run(
        program: Program, own: Strategy, loads: Sequence[tuple[int, ...]], chosen: Sequence[int]
    ) -> tuple[list[float], float]:
        found = []
        for replica, load in zip(own.replicas, loads, strict=True):
            a, b, c = COSTS[str(replica.scheme)]
            ms = sum((a * s + b) * s for s in load) + c
            held_out = load not in shapes_to_fit((8, 16, 64), 200, program.longest_sequence)
            found.append(ms * (bias if held_out else 1.0) * (5.0 if wild and wild.random() < 1 / 7 else 1.0))
        return found, max(map(sum, loads)) / 100

    return run


@pytest.fixture(scope="module")
def program() -> Program:
    return exact_program(gpt(layers=2), language_loss, MIXED)


LIMITS = MemoryLimits(budget_mib=64, max_tokens={"tp1": 200, "tp1.pp2": 200, "tp2": 200})


class TestFits:
    def test_costs_are_found_again_and_every_run_ticks(self, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure, "_run_once", made_up())
        sampling, ticks = Sampling((8, 16, 64), 2, held_out=True), []
        profile = profile_of(program, LIMITS, sampling, tick=lambda: ticks.append(1))
        assert len(ticks) == num_runs(program, LIMITS.max_tokens, sampling)
        for name, expected in COSTS.items():
            own = profile.schemes[name]
            assert (own.a, own.b, own.c) == pytest.approx(expected, rel=1e-6, abs=1e-9)
            assert own.fit is not None and own.fit.worst < 1e-3 and own.fit.points >= 3
            assert own.max_tokens == 200 and own.origin == "measured"

    def test_points_held_out_tell_the_error_and_change_no_fit(
        self, program: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure, "_run_once", made_up(bias=1.25))
        profile = profile_of(program, LIMITS, Sampling((8, 16, 64), 1, held_out=True))
        for name, expected in COSTS.items():
            own = profile.schemes[name]
            assert (own.a, own.b, own.c) == pytest.approx(expected, rel=1e-6, abs=1e-9)
            assert own.fit is not None and (own.fit.median, own.fit.worst) == pytest.approx((0.2, 0.2))

    @pytest.mark.parametrize("seed", range(4))
    def test_wild_runs_do_not_decide(self, program: Program, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        monkeypatch.setattr(measure, "_run_once", made_up(wild=Random(seed)))
        profile = profile_of(program, LIMITS, Sampling((8, 16, 64), 5, held_out=True))
        for own in profile.schemes.values():
            assert own.fit is not None and own.fit.median < 0.02

    def test_nothing_is_held_out_at_the_start_of_a_run(self, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure, "_run_once", made_up())
        assert all(own.fit is None for own in profile_of(program, LIMITS, Sampling((8, 16, 64), 1)).schemes.values())

    def test_what_takes_long_is_not_repeated(self, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure, "_run_once", made_up())
        sampling = Sampling((8, 16, 64), 3, long_s=0.64)
        (samples,) = measure.measure(program, program.pool["two"], (U(2),), LIMITS.max_tokens, sampling).values()
        assert {sum(sample.lengths): len(sample.ms) for sample in samples} == {8: 3, 16: 3, 64: 1}


class TestMemory:
    def test_limits_of_the_file_are_those_of_the_expressions(
        self, program: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure, "_run_once", made_up())
        for budget_mib in (8.0, 64.0):
            limits = MemoryLimits(budget_mib=budget_mib)
            costs = profile_of(program, limits, Sampling((8, 16, 64), 1)).profile(3)
            for scheme in program.pool.schemes:
                assert costs.cost(scheme).max_tokens == pytest.approx(max_tokens_of(program, scheme, limits), abs=1)

    @pytest.mark.parametrize("name", ["mixed", "two"])
    def test_what_is_counted_is_within_the_expressions(self, program: Program, name: str) -> None:
        own = program.pool[name]
        load, schemes = (40, 20), list(dict.fromkeys(replica.scheme for replica in own.replicas))
        share = optimizer_bytes(program.captured) // 3
        for scheme_name, counted in measure_peaks(program, own, schemes, load).items():
            stages = scheme_memory(program.compiled[scheme_name], program.captured, 3)
            predicted = [int(stage.peak_bytes.subs({TOKENS: 60, BOUNDARIES: 3})) - share for stage in stages]
            assert len(counted) == len(predicted)
            for got, most in zip(counted, predicted, strict=True):
                assert 0.3 * most < got <= 1.1 * most


TWO = "version: 1\nranks: 2\nstrategies: [{name: one, replicas: [{tp: 2}]}, {name: two, replicas: [{count: 2}]}]\n"


class TestCommand:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("two.yaml").write_text(TWO)

    def test_a_profile_is_measured_filled_written_and_planned_with(self) -> None:
        options = ("--pool", "two.yaml", *TINY, "--lengths", "4,8,16", "--repeats", "1", "--out", "p.yaml")
        text = answer("profile", *options, "--fill", "tp2.cp2", "--cluster", "4-cpu")
        assert "measured by hgraph profile on simulated ranks, by CPU time" in text and "written to p.yaml" in text
        profile = read_profile_file("p.yaml")
        assert {name: own.origin for name, own in profile.schemes.items()} == {
            "tp2": "measured", "tp1": "measured", "tp2.cp2": "analytic",
        }  # fmt: skip
        assert profile.model is not None and profile.model.layers == 2 and profile.model.kv_heads == 2
        tp2, filled = profile.schemes["tp2"], profile.schemes["tp2.cp2"]
        assert tp2.fit is not None and tp2.fit.points >= 2 and filled.fit is not None
        assert filled.memory[0].token_bytes == tp2.memory[0].token_bytes / 2
        assert set(profile.bridge_ms) == {"one", "two"}
        assert "taken: smallest predicted time" in answer(
            "plan", "--pool", "two.yaml", "--profile", "p.yaml", "--lengths", "9,5"
        )

    @pytest.mark.long
    def test_json_and_all_schemes_of_a_number_of_ranks(self) -> None:
        options = ("--ranks", "2", *TINY, "--lengths", "4,8,16", "--repeats", "1")
        data = json.loads(answer("profile", *options, "--json"))
        assert set(data["schemes"]) == {"tp1", "tp1.pp2", "tp2"} and data["ranks"] == 2
        own = data["schemes"]["tp1.pp2"]
        assert set(own) == {"a", "b", "c", "origin", "fit", "max_tokens", "memory", "peak"}
        assert own["peak"]["counted_bytes"] > 0 and own["max_tokens"] > 0 and own["memory"][0]["token_bytes"] > 0

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (["--pool", "two.yaml", "--fill", "tp4"], "expected --fill SCHEMES and --cluster NAME together"),
            (["--pool", "two.yaml", "--fill", "t4", "--cluster", "4-cpu"], "scheme: expected a scheme such as tp2"),
            (["--pool", "two.yaml", "--fill", "tp4", "--cluster", "no"], "cluster 'no': expected a file or one of the"),
            (
                ["--pool", "two.yaml", "--lengths", "4,8"],
                "--lengths: expected three or more distinct lengths of 1 token",
            ),
            (["--pool", "two.yaml", "--lengths", "4,8,x"], "distinct lengths of 1 token or more, got 'x'"),
            (
                ["--pool", "two.yaml", "--nproc", "3"],
                "--nproc: expected 2 processes, as many as the pool has ranks, got 3",
            ),
            (["--pool", "two.yaml", "--ranks", "2"], "expected --pool FILE or --ranks N, got both"),
            (["--pool", "cp.yaml"], "replicas[0].cp: context parallelism is not there yet, got cp=2; use cp: 1"),
            (
                ["--pool", "two.yaml", "--out", "two.yaml/p.yaml"],
                "expected a folder to write to, but two.yaml is a file",
            ),
            ([], "expected --config RUN.yaml or --pool FILE"),
        ],
    )
    def test_what_is_refused_before_any_work(
        self, options: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("cp.yaml").write_text("version: 1\nranks: 2\nstrategies: [{name: long, replicas: [{cp: 2}]}]\n")
        monkeypatch.setattr("runtime.cli.profile._measured", None)
        assert expected in message("profile", *options)

    @pytest.mark.long
    @pytest.mark.gloo
    def test_over_processes(self) -> None:
        command = [sys.executable, "-m", "runtime.cli", "profile", "--pool", "two.yaml", "--nproc", "2", *TINY]
        options = ["--lengths", "4,8,16", "--repeats", "1", "--out", "p.yaml"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        assert "on 2 processes, by the clock" in done.stdout and done.stdout.count("Schemes") == 1
        assert set(read_profile_file("p.yaml").schemes) == {"tp1", "tp2"}
