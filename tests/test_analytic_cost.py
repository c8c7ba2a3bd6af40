"""Costs from sizes and speeds: by hand, recovered from made-up measurements, and against the published ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hgraph.analytic_cost import CostModel, calibrated, closed_form, extrapolation_error, features, with_analytic
from hgraph.cost_fit import fit_nonnegative
from hgraph.errors import InvalidInput
from hgraph.memory_model import DeviceSizes, MemoryModel, ModelSizes, SchemeMemory
from hgraph.profile_file import ProfileFile, SchemeProfile, known_profiles, read_profile_file
from hgraph.scheme_text import parse_scheme
from hgraph.strategy import Scheme
from hgraph.topology import Link, uniform
from hgraph.topology_file import load_topology

U = Scheme.uniform
MODEL = ModelSizes(layers=4, hidden=100, ffn_hidden=300, heads=8, vocab=1000)
LINKS = Link(200.0, 5.0), Link(25.0, 10.0)
CLUSTER = uniform("4 x 4", 4, 4, *LINKS, ranks_per_port=2)


class TestFeatures:
    def test_one_rank_computes_and_moves_nothing(self) -> None:
        (found,) = features(U(), MODEL, CLUSTER)
        weights = 4 * (4 * 100**2 + 3 * 100 * 300) + 100 * 1000
        assert found.tolist() == [7 * 4 * 100, 6 * weights, 0, 0, 4, 4, 0]

    def test_tp_inside_a_node(self) -> None:
        (alone,), (split,) = features(U(), MODEL, CLUSTER), features(U(4), MODEL, CLUSTER)
        assert split[:2].tolist() == (alone[:2] / 4).tolist()
        assert split[3] == pytest.approx(8 * 4 * (2 * 100 * 3 / 4) / 200e6)
        assert split[4:].tolist() == [4, 1, pytest.approx(4 * 8 * 3 * 0.005)]

    def test_tp_across_nodes_shares_the_ports_of_a_node(self) -> None:
        (found,) = features(U(8), MODEL, CLUSTER)  # one group: both of a node's two ports carry its ring
        assert found[3] == pytest.approx(8 * 4 * (2 * 100 * 7 / 8) / 50e6)
        assert found[6] == pytest.approx(4 * 8 * 7 * 0.010)

    def test_cp_shares_out_attention_tokens_and_activations_of_tp(self) -> None:
        (plain,), (split,) = features(U(2), MODEL, CLUSTER), features(U(2, cp=2), MODEL, CLUSTER)
        assert split[:2].tolist() == (plain[:2] / 2).tolist()
        moved = 2 * 2 * (2 * 100 + 2 * 100) / (2 * 2) / 2 / 200e6  # q, k, v, out to heads and back; half stays
        assert split[3] == pytest.approx(plain[3] / 2 + 4 * moved)
        assert split[4:6].tolist() == plain[4:6].tolist()

    def test_cp_gathers_keys_and_values_where_heads_do_not_divide(self) -> None:
        (found,) = features(
            U(8, cp=2), MODEL, CLUSTER
        )  # one head a rank; each group has one rank a node, eight side by side
        tp_ms = 8 * 4 * (2 * 100 / 2 * 7 / 8) / 50e6
        gathered_ms = 3 * (2 * 2 * 100 / 8) * 1 / 2 * 4 / 50e6
        assert found[3] == pytest.approx(tp_ms + 4 * gathered_ms)

    def test_fewer_heads_of_keys_and_values(self) -> None:
        (found,) = features(U(), replace(MODEL, kv_heads=2, gated=False), CLUSTER)
        assert found[1] == 6 * (4 * (2 * 100**2 + 2 * 100 * 25 + 2 * 100 * 300) + 100 * 1000)

    def test_a_layer_split_counts(self) -> None:
        first, second = features(U(1, 2, [3, 1]), MODEL, CLUSTER)
        assert (first[4], second[4]) == (3, 1)
        assert [row[4] for row in features(U(1, 8), MODEL, CLUSTER)] == [0.5] * 8

    def test_a_scheme_larger_than_the_cluster(self) -> None:
        with pytest.raises(
            InvalidInput, match=r"scheme tp16.pp2: expected a cluster of 32 ranks or more, got 4 x 4 with 16"
        ):
            features(U(16, 2), MODEL, CLUSTER)


FACTORS = (5e-12, 4e-12, 0.0, 1.2, 1.5, 0.5, 0.2)
WORK = closed_form(ProfileFile({"tp1": SchemeProfile(1, 1, 1, max_tokens=1)}, model=MODEL), CLUSTER)
MADE_UP = CostModel(WORK, FACTORS)


def made_up(*names: str) -> ProfileFile:
    schemes = {name: SchemeProfile(*MADE_UP.coefficients(parse_scheme(name)), max_tokens=40_000) for name in names}
    return ProfileFile(schemes, model=MODEL)


class TestCalibration:
    MEASURED = ("tp1", "tp1.pp2", "tp2", "tp4", "tp8", "tp2.pp2", "tp8.pp2")

    def test_what_the_model_made_is_found_again(self) -> None:
        memory = MemoryModel(budget_mib=100, optimizer_bytes=1.0)
        known = made_up(*self.MEASURED)
        schemes = {n: replace(s, max_tokens=None, memory=(SchemeMemory(1.0, 2.0),)) for n, s in known.schemes.items()}
        profile = replace(known, schemes=schemes, memory=memory)
        found = with_analytic(profile, ["tp4.cp2", "tp2.cp2.pp2", "tp8"], CLUSTER)
        for name in ("tp4.cp2", "tp2.cp2.pp2"):
            own = found.schemes[name]
            assert (own.a, own.b, own.c) == pytest.approx(MADE_UP.coefficients(parse_scheme(name)), rel=1e-6)
            assert own.origin == "analytic" and own.memory == (SchemeMemory(1.0, 1.0),)
            assert own.fit is not None and own.fit.worst < 1e-6 and own.fit.points == 7 * 8
        assert {name: found.schemes[name] for name in schemes} == schemes, "what was measured stays"

    def test_a_wild_measurement_does_not_decide(self) -> None:
        profile = made_up(*self.MEASURED)
        wild = replace(profile.schemes["tp4"], b=10 * profile.schemes["tp4"].b)
        error = extrapolation_error(replace(profile, schemes={**profile.schemes, "tp4": wild}), WORK)
        assert error is not None and error.median < 1e-3 and error.worst > 0.3

    def test_a_degree_that_is_slower_than_the_model_stays_so(self) -> None:
        profile = made_up(*self.MEASURED)
        slower = {name: replace(s, b=1.5 * s.b) for name, s in profile.schemes.items() if name == "tp8"}
        known = {name: s for name, s in profile.schemes.items() if name != "tp8.pp2"} | slower
        _, b, _ = _added(replace(profile, schemes=known), "tp8.pp2")
        assert b == pytest.approx(1.5 * profile.schemes["tp8.pp2"].b, rel=0.1)
        other, expected = (_added(replace(profile, schemes=known), "tp4.pp2"), MADE_UP.coefficients(U(4, 2)))
        assert np.dot(other, [1e9, 32_000, 1]) == pytest.approx(np.dot(expected, [1e9, 32_000, 1]), rel=0.03)

    def test_analytic_entries_do_not_calibrate(self) -> None:
        profile = made_up(*self.MEASURED)
        wrong = replace(profile, schemes={**profile.schemes, "tp4": SchemeProfile(1.0, 1.0, 1.0, "analytic", 9)})
        assert _added(wrong, "tp1.pp4") == pytest.approx(MADE_UP.coefficients(U(1, 4)), rel=1e-6)

    def test_without_measurements_speeds_are_assumed(self) -> None:
        device = DeviceSizes("made up", 1000, 8, peak_tflops=100.0)
        entry = {"tp1": SchemeProfile(1.0, 1.0, 1.0, "analytic", 9)}
        a, _, c = _added(ProfileFile(entry, model=MODEL, device=device), "tp1.pp2")
        assert (a, c) == pytest.approx((7 * 2 * 100 / 40e12 * 1e3, 2.0))
        with pytest.raises(InvalidInput, match=r"analytic costs: expected a measured scheme .* or device.peak_tflops"):
            _added(ProfileFile(entry, model=MODEL), "tp1.pp2")

    def test_what_is_missing_is_told(self) -> None:
        with pytest.raises(InvalidInput, match=r"analytic costs: expected a profile with the sizes of its `model`"):
            _added(replace(made_up("tp1"), model=None), "tp2")
        with pytest.raises(InvalidInput, match=r"the memory of scheme tp2.cp2 is not known; .* token_bytes of tp2$"):
            with_analytic(made_up("tp1"), ["tp2.cp2"], CLUSTER)


def _added(profile: ProfileFile, name: str) -> tuple[float, float, float]:
    """Returns a, b, c that a scheme would be added with; its memory does not matter."""
    return calibrated(profile, closed_form(profile, CLUSTER)).coefficients(parse_scheme(name))


class TestPublished:
    NODE = load_topology("8x8-a800").nodes[0]
    CLUSTER = uniform("128 x 8", 128, 8, NODE.local, NODE.network, ranks_per_port=NODE.ranks_per_port)

    @pytest.mark.parametrize("name", known_profiles())
    def test_schemes_left_out_are_predicted(self, name: str) -> None:
        profile = read_profile_file(name)
        error = extrapolation_error(profile, closed_form(profile, self.CLUSTER))
        assert error is not None
        assert error.median < 0.04, "docs/profiles.md states it"
        assert error.worst < 0.7

    def test_cp_and_more_stages_at_1024_ranks(self) -> None:
        known = read_profile_file("llama-32b.a800-80gb")
        found = with_analytic(known, ["tp16.pp2", "tp16.cp2", "tp16.cp4"], self.CLUSTER)
        costs = found.profile(1024)
        tp16, half, cp2 = (costs.cost(name) for name in ("tp16", "tp16.pp2", "tp16.cp2"))
        for length in (1024, 32_768):
            assert half.micro_batch_ms([length]) == pytest.approx(tp16.micro_batch_ms([length]) / 2, rel=0.05)
        assert 0.5 < cp2.sequence_ms(32_768) / tp16.sequence_ms(32_768) < 0.6, "cp splits the work, and costs something"
        assert cp2.max_tokens == pytest.approx(2 * tp16.max_tokens, abs=128)
        assert with_analytic(found, ["tp16"], self.CLUSTER) == found

    def test_activation_bytes_of_unmeasured_degrees_are_on_the_line_and_noted(self) -> None:
        found = with_analytic(read_profile_file("llama-13b.a800-80gb"), [U(16)], self.CLUSTER)
        assert found.memory is not None and found.memory.transformer is not None
        assert 45 < found.memory.transformer.activation_bytes[16] < 70
        assert found.notes[-1] == "analytic: activation bytes of tp16, on the line through the others"
        assert found.profile(32).cost(U(16)).max_tokens > found.profile(32).cost(U(8)).max_tokens


def test_the_fit_has_no_negative_coefficients_and_takes_columns_of_any_scale() -> None:
    x = np.linspace(1, 9, 9)
    rows = np.stack([x**2 * 1e12, x, np.ones(9), np.zeros(9)], axis=1)
    assert fit_nonnegative(rows, rows @ [2e-12, 0.5, 3.0, 7.0]) == pytest.approx([2e-12, 0.5, 3.0, 0.0])
    falling = fit_nonnegative(rows, 10 - x)
    assert np.all(falling >= 0) and falling[1] == 0
