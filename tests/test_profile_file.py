"""Profile files: those that come along, token limits by the published numbers, and the text of every complaint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.errors import FileErrors, InvalidInput
from hgraph.memory_model import DeviceSizes, MemoryModel, ModelSizes, SchemeMemory, TransformerMemory
from hgraph.profile import Profile, SchemeCost
from hgraph.profile_file import (
    FitError,
    ProfileFile,
    SchemeProfile,
    check_profile_text,
    known_profiles,
    parse_profile_file,
    profile_file_text,
    read_profile_file,
    write_profile_file,
)
from hgraph.strategy import Scheme

PAGE = Path(__file__).parent.parent / "docs" / "profiles.md"
U = Scheme.uniform


def limits(name: str, num_ranks: int) -> dict[str, int]:
    return {scheme: cost.max_tokens for scheme, cost in read_profile_file(name).profile(num_ranks).schemes.items()}


class TestPublished:
    def test_all_of_them_are_there(self) -> None:
        assert known_profiles() == ("llama-13b.a800-80gb", "llama-32b.a800-80gb", "llama-32b.h20", "llama-7b.a800-80gb")
        for name in known_profiles():
            profile = read_profile_file(name)
            assert profile.name == name and profile.source and profile.model and profile.device and profile.memory
            assert {scheme.origin for scheme in profile.schemes.values()} == {"measured"}

    # Limits that the published planner (github.com/lhy101/Hydraulis, commit 4489487) computes for these layouts, as
    # recorded with its plans.
    @pytest.mark.parametrize(
        ("name", "num_ranks", "expected"),
        [
            (
                "llama-32b.a800-80gb",
                64,
                {"tp16": 43520, "tp8.pp3": 27264, "tp8": 21888, "tp4": 7808, "tp4.pp2": 12416},
            ),
            ("llama-32b.a800-80gb", 1024, {"tp16": 48256, "tp8": 24704, "tp4": 9472, "tp4.pp4": 16256}),
            (
                "llama-7b.a800-80gb",
                32,
                {"tp4": 46080, "tp1.pp2": 11264, "tp1.pp4": 12672, "tp2": 21888, "tp2.pp2": 24832, "tp2.pp4": 26112},
            ),
            (
                "llama-13b.a800-80gb",
                32,
                {"tp8": 48000, "tp4": 25984, "tp4.pp2": 29568, "tp2": 9472, "tp1.pp2": 4864, "tp1.pp8": 7424},
            ),
        ],
    )
    def test_token_limits_are_the_published_ones(self, name: str, num_ranks: int, expected: dict[str, int]) -> None:
        found = limits(name, num_ranks)
        assert {scheme: found[scheme] for scheme in expected} == expected

    def test_a_scheme_without_room_is_absent_and_asking_for_it_says_why(self) -> None:
        profile = read_profile_file("llama-32b.a800-80gb").profile(64)
        assert set(profile.absent) == {"tp1.pp2", "tp2"}
        with pytest.raises(InvalidInput) as error:
            profile.cost(U(2))
        assert str(error.value).startswith(
            "profile: scheme tp2 cannot be used: states and weights leave no room for the least micro-batch, 128 "
            "tokens, in 66,012 MiB per rank, with optimizer states spread over 64 ranks; it has ['tp1.pp4', 'tp16',"
        )
        assert "tp2" in read_profile_file("llama-32b.a800-80gb").profile(1024).schemes, "spread thinner, it fits"

    def test_numbers_are_those_of_the_publication(self) -> None:
        cost = read_profile_file("llama-32b.a800-80gb").profile(64).cost(U(8))
        assert (cost.a, cost.b, cost.c) == (2.12548718e-06, 0.141411593, 122.91021345581066)
        assert read_profile_file("llama-32b.h20").profile(64).cost(U(16)).c == 115.04115067079397


class TestClosedForm:
    MODEL = ModelSizes(layers=8, hidden=100, ffn_hidden=300, heads=4, vocab=1000)
    FORM = TransformerMemory({1: 10.0, 2: 12.0}, 200.0, 0.75, 32.0, 16.0)

    def test_by_hand(self) -> None:
        assert self.FORM.optimizer_bytes(self.MODEL) == 0.75 * (8 * 100**2 * 200 + 100 * 1000 * 32)
        (alone,) = self.FORM.stages(U(2), self.MODEL)
        assert alone == SchemeMemory(0.25 * (8 * 100**2 * 200 + 100 * 1000 * 32) / 2, 8 * 100 / 2 * 12)

    def test_cp_splits_activations_and_copies_weights(self) -> None:
        (plain,), (split,) = self.FORM.stages(U(2), self.MODEL), self.FORM.stages(U(2, cp=2), self.MODEL)
        assert split == SchemeMemory(plain.fixed_bytes, plain.token_bytes / 2)

    def test_each_stage_keeps_what_1f1b_keeps(self) -> None:
        first, second, third = self.FORM.stages(U(1, 3, [4, 3, 1]), self.MODEL)
        assert [stage.token_bytes / 1000 for stage in (first, second, third)] == [3 * 4, 2 * 3, 1]
        embedding = 0.25 * 100 * 1000 * 16
        states = [0.25 * layers * 100**2 * 200 for layers in (4, 3, 1)]
        assert [stage.fixed_bytes for stage in (first, second, third)] == [
            states[0] + embedding, states[1], states[2] + embedding,
        ]  # fmt: skip

    def test_the_fullest_stage_decides_and_multiples_are_kept(self) -> None:
        memory = MemoryModel(budget_mib=100, token_multiple=64, transformer=self.FORM)
        stages = self.FORM.stages(U(1, 2, [2, 6]), self.MODEL)
        spread = self.FORM.optimizer_bytes(self.MODEL) / 4
        least = min((100 * 2**20 - spread - stage.fixed_bytes) / stage.token_bytes for stage in stages)
        found = memory.token_limit(U(1, 2, [2, 6]), 4, (), self.MODEL, None)
        assert found == least // 64 * 64 and found % 64 == 0
        assert (least, stages[1].token_bytes) == ((100 * 2**20 - spread - stages[1].fixed_bytes) / 6000, 6000)

    def test_gpipe_and_unknown_degrees_are_told(self) -> None:
        memory = MemoryModel(budget_mib=100, transformer=self.FORM)
        schemes = {"tp1.pp2:gpipe": SchemeProfile(0, 1, 0)}
        with pytest.raises(InvalidInput, match=r"scheme tp1.pp2:gpipe has no token limit: schedule gpipe keeps all"):
            ProfileFile(schemes, model=self.MODEL, memory=memory)
        with pytest.raises(
            InvalidInput, match=r"scheme tp4 has no token limit: no activation bytes for tp4; .* tp1, tp2"
        ):
            ProfileFile({"tp4": SchemeProfile(0, 1, 0)}, model=self.MODEL, memory=memory)
        assert ProfileFile({"tp4": SchemeProfile(0, 1, 0, max_tokens=9)}).profile(3).cost("tp4").max_tokens == 9


positive = st.floats(1e-12, 1e12)
texts = st.text("ab:#'\" \né", max_size=4)
costs = st.builds(
    SchemeProfile,
    positive | st.just(0.0),
    positive,
    st.integers(0, 10).map(float),
    st.sampled_from(["measured", "analytic"]),
    max_tokens=st.none() | st.integers(1, 10**6),
    memory=st.lists(st.builds(SchemeMemory, st.integers(0, 10**9).map(float), positive), max_size=2),
    fit=st.none() | st.builds(FitError, st.floats(0, 1), st.floats(1, 2), st.integers(1, 9)),
)
files = st.builds(
    ProfileFile,
    st.dictionaries(st.sampled_from(["tp1", "tp2.cp2", "tp1.pp2(3,1)", "tp2.pp2"]), costs, min_size=1),
    st.dictionaries(texts, positive, max_size=2),
    texts,
    st.builds(ModelSizes, *[st.integers(1, 99)] * 5, st.none() | st.integers(1, 9), st.booleans(), texts),
    st.builds(DeviceSizes, texts, positive, st.integers(1, 8), st.none() | positive, texts),
    st.builds(
        MemoryModel,
        st.none() | positive,
        positive,
        st.just(0.0),
        st.integers(1, 128),
        st.none() | positive,
        st.builds(TransformerMemory, st.just({1: 3.0, 2: 4.5}), positive, st.floats(0, 1), positive, positive),
        texts,
    ),
    texts,
    st.lists(st.just("note: # x"), max_size=2),
)


@settings(max_examples=40)
@given(files)
def test_what_is_written_reads_as_equal_and_writes_the_same(profile: ProfileFile) -> None:
    text = profile_file_text(profile)
    assert parse_profile_file(text) == profile
    assert profile_file_text(parse_profile_file(text)) == text


@pytest.mark.parametrize("name", known_profiles())
def test_those_that_come_along_are_written_as_they_were_read(name: str) -> None:
    profile = read_profile_file(name)
    assert parse_profile_file(profile_file_text(profile)) == profile


def test_fixed_limits_are_kept_through_a_file(tmp_path: Path) -> None:
    profile = Profile({"tp2.pp2": SchemeCost(1e-5, 0.02, 2.0, 400), "tp1": SchemeCost(0, 0.5, 0, 7)}, {"s": 1.5})
    write_profile_file(tmp_path / "new" / "p.yaml", ProfileFile.of(profile))
    assert read_profile_file(tmp_path / "new" / "p.yaml").profile(4) == profile
    assert os.listdir(tmp_path / "new") == ["p.yaml"], "no half file is left"


def test_json_is_read_too(tmp_path: Path) -> None:
    data = {"version": 1, "schemes": {"tp2": {"a": 1e-05, "b": 3, "c": 0.5, "max_tokens": 8}}, "bridge_ms": {"x": 2}}
    (tmp_path / "p.json").write_text(json.dumps(data, indent=2))
    assert read_profile_file(tmp_path / "p.json").profile(1) == Profile({"tp2": SchemeCost(1e-5, 3, 0.5, 8)}, {"x": 2})


GOOD = "{a: 0, b: 1, c: 0, max_tokens: 5}"
FORM = "activation_bytes: {{{}: 3}}, state_bytes: 1, optimizer_share: {}, embedding_bytes: 1, split_embedding_bytes: 1"
NOTHING = "expected a value, got nothing; the key is missing"
SCHEME_FAULTS = [
    ("{a: 1}", [f".b: {NOTHING}", f".c: {NOTHING}"]),
    ("{a: -1, b: 0, c: 0, max_tokens: 5}", [".a: expected a value of 0 or more, got -1"]),
    ("{a: x, b: 0, c: 0, max_tokens: 5}", [".a: expected a number, got text 'x'"]),
    ("{a: 0, b: .inf, c: 0, max_tokens: 1}", [".b: expected a finite number, got inf"]),
    ("{a: 0, b: 0, c: 0, max_tokens: 0}", [".max_tokens: expected a value of 1 or more, got 0"]),
    ("{a: 0, b: 0, c: 0}", [": scheme tp1 has no token limit: its memory is not known; give max_tokens"]),
    (
        "{a: 0, b: 0, c: 0, fixed_bytes: [1, x], token_bytes: [0, -1]}",
        [
            ".fixed_bytes[1]: expected a number of bytes, 0 or more, got text 'x'",
            ".token_bytes[0]: expected a number of bytes, above 0, got 0",
            ".token_bytes[1]: expected a number of bytes, above 0, got -1",
        ],
    ),
    (
        "{a: 0, b: 0, c: 0, fixed_bytes: 1}",
        [": expected fixed_bytes and token_bytes for the same stages, or neither, got 1 and 0"],
    ),
    (
        "{a: 0, b: 0, c: 0, max_token: 1}",
        [
            ".max_token: unknown key; the keys here are a, b, c, origin, max_tokens, fixed_bytes, token_bytes, fit; "
            "did you mean 'max_tokens'?"
        ],
    ),
    (
        "{a: 0, b: 0, c: 0, max_tokens: 1, origin: guessed}",
        [".origin: expected 'measured' or 'analytic', got text 'guessed'"],
    ),
    (
        "{a: 0, b: 0, c: 0, max_tokens: 1, fit: {median: 2, worst: 1, points: 1}}",
        [".fit: expected worst of at least median, 2.0, got 1.0"],
    ),
]
FILE_FAULTS = [
    (
        f"schemes: {{t4: {GOOD}}}",
        [
            "line 2: schemes.t4: expected a scheme such as tp2, tp4.cp2.pp2, tp1.pp2(3,1) or tp3+tp1(2,1), got 't4'",
        ],
    ),
    (
        "schemes: {}",
        ["line 2: schemes: expected costs by scheme, such as tp2: {a: ..., b: ..., c: ...}, got an empty mapping"],
    ),
    ("name: x", [f"line 1: schemes: {NOTHING}"]),
    (f"schemes: {{tp1: {GOOD}}}\nbridge_ms: {{s: -1}}", ["line 3: bridge_ms.s: expected a value of 0 or more, got -1"]),
    (
        f"schemes: {{tp1: {GOOD}}}\nmemory: {{reserve_mib: 3}}",
        ["line 3: memory: expected budget_mib, or a `device` whose memory_mib is the budget, got neither"],
    ),
    (
        f"schemes: {{tp1: {GOOD}}}\nmemory:\n  budget_mib: 1\n  transformer: {{{FORM.format(2, 2)}}}",
        ["line 5: memory.transformer.optimizer_share: expected a value of 1 or less, got 2"],
    ),
    (
        f"schemes: {{tp1: {GOOD}}}\nmemory:\n  budget_mib: 1\n  transformer: {{{FORM.format(2, 1)}}}",
        [
            "line 5: memory.transformer: expected `model` with the sizes that this form needs, got none",
            "line 5: memory.transformer.activation_bytes.2: expected a tensor-parallel degree such as tp2, got '2'",
        ],
    ),
    (
        f"schemes: {{tp1: {GOOD}}}\nmodel: {{layers: 0, hidden: 1, heads: 1, vocab: 1}}\ndevice: 3",
        [
            f"line 3: model.ffn_hidden: {NOTHING}",
            "line 3: model.layers: expected a value of 1 or more, got 0",
            "line 4: device: expected a mapping, got 3",
        ],
    ),
]


@pytest.mark.parametrize(("entry", "messages"), SCHEME_FAULTS)
def test_a_fault_of_a_scheme(entry: str, messages: list[str]) -> None:
    found = check_profile_text(f"version: 1\nschemes: {{tp1: {entry}}}").problems
    assert [str(problem) for problem in found] == ["line 2: schemes.tp1" + message for message in messages]


@pytest.mark.parametrize(("text", "messages"), FILE_FAULTS)
def test_a_fault_of_a_file(text: str, messages: list[str]) -> None:
    assert [str(problem) for problem in check_profile_text("version: 1\n" + text).problems] == messages


def test_every_fault_in_one_report() -> None:
    text = "version: 2\nschemes:\n  tp1: {a: 1}\n  tp2: {a: x, b: 0, c: 0, max_tokens: 5}\nbridge_ms: {s: -1}\n"
    with pytest.raises(FileErrors) as caught:
        parse_profile_file(text, "p.yaml")
    assert str(caught.value).splitlines() == [
        "p.yaml: 5 problems",
        "  p.yaml: line 1: version: expected version 1, got 2; this release reads no other",
        "  p.yaml: line 3: schemes.tp1.b: expected a value, got nothing; the key is missing",
        "  p.yaml: line 3: schemes.tp1.c: expected a value, got nothing; the key is missing",
        "  p.yaml: line 4: schemes.tp2.a: expected a number, got text 'x'",
        "  p.yaml: line 5: bridge_ms.s: expected a value of 0 or more, got -1",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "got an empty file"), ("{", "YAML syntax"), ("[]", "expected a mapping, got a list")],
)
def test_no_profile_at_all(text: str, expected: str) -> None:
    with pytest.raises(FileErrors, match=expected):
        parse_profile_file(text)


def test_neither_file_nor_name() -> None:
    text = (
        r"profile 'llama-32b.h200': expected a file or one of the names .*, got neither; did you mean 'llama-32b.h20'"
    )
    with pytest.raises(InvalidInput, match=text):
        read_profile_file("llama-32b.h200")
    with pytest.raises(InvalidInput, match=r"^none.yaml: expected a file that can be read"):
        read_profile_file("none.yaml")


def test_the_example_of_the_page_is_read() -> None:
    example = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    profile = parse_profile_file(example)
    assert profile_file_text(profile) == example
    assert profile.profile(8).schemes
