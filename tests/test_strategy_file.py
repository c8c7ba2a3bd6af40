"""Strategy files: what is read, what is written, and the text of every complaint."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgraph.errors import FileErrors, InvalidInput
from hgraph.model_facts import ModelFacts
from hgraph.strategy import Override, Pool, Replica, Scheme, Stage, Strategy
from hgraph.strategy_file import check_pool_file, check_pool_text, load_pool, parse_pool, write_pool

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "first_light" / "strategies.yaml"

MODEL = ModelFacts(
    num_layers=4,
    num_query_heads=6,
    parameter_names=("embed.weight", "layers.0.mlp.up.weight", "layers.1.mlp.up.weight", "head.weight"),
    module_names=("layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp"),
    parameter_shapes={"layers.0.mlp.up.weight": (12, 4), "layers.1.mlp.up.weight": (12, 4)},
)


PAGE = EXAMPLE.parent.parent.parent / "docs" / "strategy-files.md"


def pool_text(strategies: str, ranks: int = 4) -> str:
    """Returns a file whose first strategy starts on line 4."""
    return f"version: 1\nranks: {ranks}\nstrategies:\n{strategies}\n"


def one_replica(replica: str, ranks: int = 4) -> str:
    """Returns a file with one strategy of one entry, which is on line 6."""
    return pool_text(f"  - name: only\n    replicas:\n      - {replica}", ranks)


def complaints(text: str, **options: object) -> list[str]:
    return [str(problem) for problem in check_pool_text(text, **options).problems]  # type: ignore[arg-type]


# What is read


def test_the_example_reads() -> None:
    pool = load_pool(EXAMPLE, model=MODEL, refuse_idle=True)
    assert pool.num_ranks == 4 and pool.template == "megatron"
    assert [strategy.name for strategy in pool.strategies] == [
        *("tp4", "tp2.pp2", "tp2x2", "tp2+tp1x2", "pp2+tp1x2", "tp1x4")
    ]
    assert pool["pp2+tp1x2"].replicas == (
        Replica(Scheme((Stage(1, 3), Stage(1, 1))), (0, 1)),
        Replica(Scheme((Stage(1),)), (2,)),
        Replica(Scheme((Stage(1),)), (3,)),
    )


def test_the_example_of_the_docs_reads() -> None:
    text = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    report = check_pool_text(text)
    assert not report.problems and not report.notes, str(report)
    assert write_pool(parse_pool(text)).startswith("version: 1\nranks: 8\n")


@pytest.mark.parametrize(
    ("replica", "scheme"),
    [
        ("{}", Scheme.uniform()),
        ("{tp: 2}", Scheme.uniform(2)),
        ("{tp: 2, pp: 2}", Scheme.uniform(2, 2)),
        ("{layers: [3, 1]}", Scheme.uniform(1, 2, [3, 1])),
        ("{pp: 2, layers: [4, 0], schedule: gpipe}", Scheme.uniform(1, 2, [4, 0], schedule="gpipe")),
        ("{stages: [{tp: 3, layers: 2}, {layers: 2}]}", Scheme((Stage(3, 2), Stage(1, 2)))),
        ("{stages: [{tp: 3}, {tp: 1}]}", Scheme((Stage(3), Stage(1)))),
    ],
)
def test_a_replica_reads_as_its_scheme(replica: str, scheme: Scheme) -> None:
    pool = parse_pool(one_replica(replica), model=MODEL)
    assert pool.strategies == (Strategy("only", (Replica(scheme, tuple(range(scheme.num_ranks))),)),)


@pytest.mark.parametrize(
    ("replicas", "ranks"),
    [
        ("[{tp: 2}, {count: 2}]", [(0, 1), (2,), (3,)]),
        ("[{tp: 2, ranks: [1, 3]}, {count: 2}]", [(1, 3), (0,), (2,)]),
        ("[{tp: 2}, {ranks: [0]}]", [(1, 2), (0,)]),
        ("[{ranks: [[3], [1]]}]", [(3,), (1,)]),
        ("[{count: 2, ranks: [[3], [1]]}]", [(3,), (1,)]),
        ("[{tp: 2, ranks: [3, 2]}]", [(3, 2)]),
    ],
)
def test_ranks_not_given_are_the_lowest_free_ones(replicas: str, ranks: list[tuple[int, ...]]) -> None:
    pool = parse_pool(pool_text(f"  - {{name: only, replicas: {replicas}}}"))
    assert [replica.ranks for replica in pool["only"].replicas] == ranks


def test_overrides_of_a_replica_go_before_those_of_its_strategy() -> None:
    text = pool_text("""
  - name: only
    replicas:
      - tp: 2
        overrides: {"layers.*.mlp.up.weight": "0-1[S(1)]"}
      - {tp: 2}
    overrides:
      embed.weight: "0-1[ S(0:7,5) ]"
      "layers.*.mlp.up.weight": 0[] + 1[] @ R
""")
    first, second = parse_pool(text, model=MODEL)["only"].replicas
    embed = Override("embed.weight", "0-1[S(0:7,5)]")
    assert first.scheme.overrides == (embed, Override("layers.*.mlp.up.weight", "0-1[S(1)]"))
    assert second.scheme.overrides == (embed, Override("layers.*.mlp.up.weight", "0[] + 1[] @ R"))


def test_a_template_may_be_a_mapping() -> None:
    text = "template: {'*.up.weight': column, embed.*: vocab}\n" + one_replica("{}")
    assert parse_pool(text, model=MODEL).template == (("*.up.weight", "column"), ("embed.*", "vocab"))


def test_aliases_are_read() -> None:
    pool = parse_pool(pool_text("  - {name: a, replicas: &one [{tp: 4}]}\n  - {name: b, replicas: *one}"))
    assert pool["a"].replicas == pool["b"].replicas


# What is written


def test_the_canonical_text_is_short() -> None:
    text = """\
version: 1
ranks: 8
template: megatron
strategies:
  - name: mixed
    replicas:
      - {tp: 2, pp: 2, layers: [3, 1], schedule: gpipe}
      - {tp: 1, count: 2}
      - tp: 2
        overrides:
          layers.*.mlp: 0[] + 1[] @ S(0)
  - name: placed
    replicas:
      - {tp: 1, count: 2, ranks: [[3], [0]]}
      - {stages: [{tp: 3}, {tp: 1}], ranks: [1, 2, 4, 5]}
"""
    assert write_pool(parse_pool(text)) == text


overrides = st.lists(
    st.builds(
        Override,
        st.sampled_from(["embed.weight", "layers.*.mlp", "1", "a: b", "[x]", "*"]),
        st.sampled_from(["0[]", "0[] + 1[] @ S(0)", "0-1[S(0:3,1)]", "1,0[R]"]),
    ),
    max_size=2,
    unique_by=lambda override: override.pattern,
)


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    pp = draw(st.integers(1, 3))
    with_layers = draw(st.booleans())
    cp = draw(st.sampled_from([1, 1, 2])) if pp == 1 else 1
    stages = [Stage(draw(st.integers(1, 3)), draw(st.integers(0, 4)) if with_layers else None, cp) for _ in range(pp)]
    chosen = draw(overrides) if stages[0].tp > 1 else []
    return Scheme(tuple(stages), draw(st.sampled_from(["1f1b", "gpipe"])), tuple(chosen))


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    num_ranks = 32
    strategies = []
    for name in draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3, unique=True)):
        free = draw(st.permutations(range(num_ranks))) if draw(st.booleans()) else list(range(num_ranks))
        chosen = draw(st.lists(schemes(), min_size=1, max_size=2))
        replicas = []
        for scheme in [scheme for scheme in chosen for _ in range(draw(st.integers(1, 2)))][:3]:
            ranks, free = free[: scheme.num_ranks], free[scheme.num_ranks :]
            replicas.append(Replica(scheme, tuple(ranks)))
        strategies.append(Strategy(name, tuple(replicas)))
    template = draw(st.sampled_from(["megatron", "hf", (("*.up", "column"), ("on", "row"))]))
    return Pool(num_ranks, tuple(strategies), template)


@given(pools())
def test_what_is_written_reads_as_an_equal_pool_and_writes_the_same(pool: Pool) -> None:
    text = write_pool(pool)
    assert parse_pool(text) == pool
    assert write_pool(parse_pool(text)) == text


# What is wrong

AT = "line 6: strategies[0].replicas[0]"

REPLICA_FAULTS = [
    ("{tp: two}", ".tp: expected an integer, got text 'two'"),
    ("{tp: '2'}", ".tp: expected an integer, got text '2'; write it without quotes"),
    ("{tp: 1.5}", ".tp: expected an integer, got 1.5"),
    ("{tp: true}", ".tp: expected an integer, got true"),
    ("{tp: 0}", ".tp: expected a value of 1 or more, got 0"),
    ("{count: 0}", ".count: expected a value of 1 or more, got 0"),
    ("{layers: 3}", ".layers: expected a list, got 3"),
    ("{pp: 2, layers: [3, -1]}", ".layers[1]: expected a value of 0 or more, got -1"),
    ("{pp: 2, layers: [1, 2, 1]}", ".layers: expected 2 layer counts, one per stage of pp=2, got 3: [1, 2, 1]"),
    ("{schedule: 1f1}", ".schedule: expected '1f1b' or 'gpipe', got text '1f1'; did you mean '1f1b'?"),
    (
        "{tpp: 2}",
        ".tpp: unknown key; the keys here are tp, pp, cp, layers, stages, schedule, count, ranks, overrides; "
        "did you mean 'tp' or 'pp'?",
    ),
    ("{stages: []}", ".stages: expected a list of 1 or more items, got 0"),
    (
        "{stages: [{layer: 2}]}",
        ".stages[0].layer: unknown key; the keys here are tp, cp, layers; did you mean 'layers'?",
    ),
    ("{stages: [{}], tp: 2}", ".tp: expected either `stages` or `tp`, got both; say it in each stage"),
    (
        "{stages: [{layers: 2}, {}]}",
        ".stages: expected `layers` in every stage or in none, got it in some",
    ),
    ("{tp: 7}", ".tp: expected tp of at most 6, the model's query heads, got 7; use a smaller tp, or more stages"),
    (
        "{stages: [{tp: 1}, {tp: 7}]}",
        ".stages[1].tp: expected tp of at most 6, the model's query heads, got 7; use a smaller tp, or more stages",
    ),
    ("{pp: 5}", ".pp: expected at most 4 stages, the model's layers, got pp=5; use fewer stages"),
    (
        "{pp: 2, layers: [3, 2]}",
        ".layers: expected layer counts that sum to the model's 4 layers, got [3, 2], which sum to 5",
    ),
    (
        "{stages: [{layers: 3}, {layers: 0}]}",
        ".stages: expected layer counts that sum to the model's 4 layers, got [3, 0], which sum to 3",
    ),
    ("{tp: 2, ranks: [0]}", ".ranks: expected 2 ranks, as tp2 needs, got 1"),
    ("{tp: 2, ranks: [0, 0]}", ".ranks[1]: rank 0 is in replicas[0].ranks[0] already; a rank belongs to one replica"),
    ("{tp: 2, ranks: [0, 8]}", ".ranks[1]: rank 8 is out of range; expected 0 to 7, as `ranks` says"),
    ("{ranks: [-1]}", ".ranks[0]: rank -1 is out of range; expected 0 to 7, as `ranks` says"),
    ("{ranks: [a]}", ".ranks[0]: expected a rank, got text 'a'"),
    ("{ranks: 0}", ".ranks: expected a list, got 0"),
    (
        "{count: 2, ranks: [0]}",
        ".ranks: expected 2 lists of ranks, one for each of count: 2, got 1; write [[...], [...]]",
    ),
    (
        "{ranks: [0, [1]]}",
        ".ranks: expected a list of ranks, or a list of such lists, one per copy; got a mix of both",
    ),
    ("{overrides: 3}", ".overrides: expected a mapping, got 3"),
    ("{overrides: {embed.weight: 3}}", ".overrides['embed.weight']: expected text, got 3"),
    (
        "{overrides: {embed.weight: '0[S(x)]'}}",
        ".overrides['embed.weight']: placement: expected R, S(dim), S(dim:sizes), P or P(max), got 'S(x)'",
    ),
    (
        "{overrides: {embed.weight: '0[S(0:,)]'}}",
        ".overrides['embed.weight']: annotation: expected text such as '0-1[S(0)] + 2[] @ R', got '0[S(0:,)]'",
    ),
    (
        "{overrides: {embed.weight: '0-1[R]'}}",
        ".overrides['embed.weight']: rank 1 is out of range; ranks here are counted from 0 within the replica, "
        "and replicas[0] (tp1) has 1",
    ),
    (
        "{tp: 2, overrides: {embed.weight: '0-1[P]'}}",
        ".overrides['embed.weight']: expected a parameter embed.weight without partial terms, got 0-1[P]",
    ),
    (
        "{tp: 2, overrides: {layers.*.up.weight: '0-1[S(2)]'}}",
        ".overrides['layers.*.up.weight']: 0-1[S(2)]: S(2) on a tensor of 2 dims; expected a dim below 2 "
        "(parameter layers.0.mlp.up.weight of shape [12, 4])",
    ),
    (
        "{tp: 2, overrides: {layers.*.up.weight: '0-1[S(0:8,8)]'}}",
        ".overrides['layers.*.up.weight']: S(0:8,8): expected 2 sizes that sum to 12, got 2 sizes that sum to 16 "
        "(parameter layers.0.mlp.up.weight of shape [12, 4])",
    ),
    (
        "{overrides: {layers.*.mlp.upp.weight: '0[]'}}",
        ".overrides['layers.*.mlp.upp.weight']: the pattern matches no parameter or module of the model; "
        "did you mean 'layers.0.mlp.up.weight' or 'layers.1.mlp.up.weight' or 'layers.0.mlp'?",
    ),
    ("3", ": expected a mapping, got 3"),
    ("~", ": expected a mapping, got nothing"),
]


@pytest.mark.parametrize(("replica", "message"), REPLICA_FAULTS, ids=[replica for replica, _ in REPLICA_FAULTS])
def test_a_fault_of_a_replica(replica: str, message: str) -> None:
    assert complaints(one_replica(replica, ranks=8), model=MODEL) == [AT + message]


FILE_FAULTS = [
    ("", ["line 1: expected a mapping, got an empty file"]),
    ("# nothing\n", ["line 1: expected a mapping, got an empty file"]),
    ("- 1\n", ["line 1: expected a mapping, got a list"]),
    (
        "version: 1\nranks: [4\nstrategies: 3\n",
        [
            "line 3: YAML syntax, column 11: expected ',' or ']', but got ':' (while parsing a flow sequence that "
            "starts on line 2); check brackets, quotes, and that items of one list start in one column"
        ],
    ),
    (
        "version: 1\n\tranks: 4\n",
        [
            "line 2: YAML syntax, column 1: found character '\\t' that cannot start any token; "
            "check brackets, quotes, and that items of one list start in one column"
        ],
    ),
    (
        "version: 1\nranks: 4\nranks: 5\nstrategies:\n  - {name: a, name: b}\n",
        [
            "line 3: ranks: the key appears twice; the first is on line 2",
            "line 5: strategies[0].name: the key appears twice; the first is on line 5",
        ],
    ),
    (
        "version: 2\nranks: 1\nstrategies: [{name: a, replicas: [{}]}]\n",
        ["line 1: version: expected version 1, got 2; this release reads no other"],
    ),
    (
        "strategies: []\n",
        [
            "line 1: ranks: expected a value, got nothing; the key is missing",
            "line 1: strategies: expected a list of 1 or more items, got 0",
            "line 1: version: expected a value, got nothing; the key is missing",
        ],
    ),
    (
        pool_text("  - {name: a, replicas: [{}]}\n  - {name: a, replicas: [{}]}\n  - replicas: [{}]"),
        [
            "line 5: strategies[1].name: the name 'a' is taken by the strategy on line 4; choose another",
            "line 6: strategies[2].name: expected a value, got nothing; the key is missing",
        ],
    ),
    (
        pool_text("  - {name: a, replicas: []}\n  - {name: '', replicas: [{}], colour: red}"),
        [
            "line 4: strategies[0].replicas: expected a list of 1 or more items, got 0",
            "line 5: strategies[1].colour: unknown key; the keys here are name, replicas, overrides",
            "line 5: strategies[1].name: expected text of 1 or more characters, got text ''",
        ],
    ),
    (
        pool_text("  - {name: a, replicas: [{tp: 4, count: 2}]}"),
        [
            "line 4: strategies[0]: the strategy needs 8 ranks, the pool has 4; use fewer or smaller replicas, "
            "or set `ranks: 8`"
        ],
    ),
    (
        pool_text("  - name: a\n    replicas:\n      - {tp: 2, ranks: [0, 2]}\n      - {tp: 2, ranks: [2, 1]}"),
        [
            "line 7: strategies[0].replicas[1].ranks[0]: rank 2 is in replicas[0].ranks[1] already; "
            "a rank belongs to one replica"
        ],
    ),
    (
        pool_text("  - name: a\n    replicas: [{tp: 2}, {count: 2}]\n    overrides: {embed.weight: '0-1[S(0)]'}"),
        [
            "line 6: strategies[0].overrides['embed.weight']: rank 1 is out of range; ranks here are counted from 0 "
            "within the replica, and replicas[1] (tp1) has 1; move the override into the replica it is for"
        ],
    ),
    (
        "template: megatrn\n" + one_replica("{}"),
        [
            "line 1: template: expected 'megatron', 'hf', or a mapping of parameter-name patterns, "
            "got text 'megatrn'; did you mean 'megatron'?"
        ],
    ),
    (
        "template:\n  head.weight: columns\n  heads.weight: row\n" + one_replica("{}"),
        [
            "line 2: template['head.weight']: expected column, row, vocab or replicate, got text 'columns'; "
            "did you mean 'column'?",
            "line 3: template['heads.weight']: the pattern matches no parameter of the model; "
            "did you mean 'head.weight' or 'embed.weight'?",
        ],
    ),
    (
        "optimizer_layout: spred\n" + one_replica("{}"),
        ["line 1: optimizer_layout: expected 'spread', got text 'spred'; did you mean 'spread'?"],
    ),
]


@pytest.mark.parametrize(("text", "messages"), FILE_FAULTS)
def test_a_fault_of_a_file(text: str, messages: list[str]) -> None:
    assert complaints(text, model=MODEL) == messages


CONTEXT_PARALLEL = [
    ("{cp: 2}", ".cp: context parallelism is not there yet, got cp=2; use cp: 1", "tp1.cp2"),
    (
        "{stages: [{cp: 2}, {}]}",
        ".stages[0].cp: context parallelism is not there yet, got cp=2; use cp: 1",
        "tp1.cp2+tp1",
    ),
    ("{tp: 2, cp: 2, pp: 2}", ".cp: context parallelism is not there yet, got cp=2; use cp: 1", "tp2.cp2.pp2"),
]


@pytest.mark.parametrize(("replica", "message", "scheme"), CONTEXT_PARALLEL)
def test_cp_can_be_planned_but_not_trained(replica: str, message: str, scheme: str) -> None:
    text = one_replica(replica, ranks=8)
    (fault,) = (fault for fault in complaints(text, trainable=True) if "idle" not in fault)
    assert fault == AT + message
    pool = parse_pool(text)
    assert [str(own) for own in pool.schemes] == [scheme]
    assert parse_pool(write_pool(pool)) == pool


def test_every_fault_is_in_one_report() -> None:
    text = """\
version: 1
ranks: 4
strategies:
  - name: first
    replicas: [{tp: 0}, {tp: 7}]
  - name: first
    replicas: [{ranks: [9]}, {tpp: 1}, {ranks: [1, 1]}]
"""
    with pytest.raises(FileErrors) as error:
        parse_pool(text, "pool.yaml", model=MODEL)
    assert str(error.value).splitlines() == [
        "pool.yaml: 7 problems",
        "  pool.yaml: line 5: strategies[0].replicas[0].tp: expected a value of 1 or more, got 0",
        "  pool.yaml: line 5: strategies[0].replicas[1].tp: expected tp of at most 6, the model's query heads, got 7; "
        "use a smaller tp, or more stages",
        "  pool.yaml: line 6: strategies[1].name: the name 'first' is taken by the strategy on line 4; choose another",
        "  pool.yaml: line 7: strategies[1].replicas[0].ranks[0]: rank 9 is out of range; expected 0 to 3, "
        "as `ranks` says",
        "  pool.yaml: line 7: strategies[1].replicas[1].tpp: unknown key; the keys here are tp, pp, cp, layers, "
        "stages, schedule, count, ranks, overrides; did you mean 'tp' or 'pp'?",
        "  pool.yaml: line 7: strategies[1].replicas[2].ranks: expected 1 ranks, as tp1 needs, got 2",
        "  pool.yaml: line 7: strategies[1].replicas[2].ranks[1]: rank 1 is in replicas[2].ranks[0] already; "
        "a rank belongs to one replica",
    ]


@pytest.mark.case(68)
def test_idle_ranks_are_named_and_refused_by_option() -> None:
    text = pool_text("  - {name: a, replicas: [{tp: 2, ranks: [0, 3]}]}\n  - {name: b, replicas: [{tp: 3}]}")
    report = check_pool_text(text, "pool.yaml")
    assert report.pool is not None
    assert str(report).splitlines() == [
        "pool.yaml: no problems; strategies: 2, ranks: 4",
        "  pool.yaml: note: line 4: strategies[0]: ranks 1, 2 are idle",
        "  pool.yaml: note: line 5: strategies[1]: rank 3 is idle",
    ]
    assert complaints(text, refuse_idle=True) == [
        "line 4: strategies[0]: ranks 1, 2 are idle, and idle ranks are refused; add a replica, or enlarge one",
        "line 5: strategies[1]: rank 3 is idle, and idle ranks are refused; add a replica, or enlarge one",
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(InvalidInput) as error:
        load_pool(missing)
    assert str(error.value) == f"{missing}: expected a file that can be read, got: No such file or directory"
    picture = tmp_path / "picture.yaml"
    picture.write_bytes(b"name: \xff\xfe")
    with pytest.raises(InvalidInput) as error:
        check_pool_file(picture)
    assert str(error.value) == f"{picture}: expected text in UTF-8, got other bytes at position 6"


def test_facts_of_a_model_check_themselves() -> None:
    with pytest.raises(InvalidInput, match="expected at least one layer and one query head, got num_layers=0"):
        ModelFacts(0, 1, ())
    with pytest.raises(InvalidInput, match="expected shapes of parameters only, got one for 'b'"):
        ModelFacts(1, 1, ("a",), (), {"b": (1,)})
