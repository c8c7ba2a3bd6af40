"""Ground truth of sharding rules: local results of the specialised operator, recombined, against the plain operator.

`Case` is one sample at concrete sizes. `Case.error(required, outputs)` runs the operator on what each rank holds under
`required`, through the same specialisation as the real passes, and says how the recombined result differs from the
plain one under `outputs`; None where they agree.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from hgraph.annotation import Annotation
from hgraph.graph import BOUNDARIES, TOKENS, NodeInfo, Shape, evaluate_shape, set_info
from hgraph.shard_map import Box, Piece, ShardMap, shard_map
from passes.program import Program, compile_program
from passes.rules.lift import Solution, solve
from passes.rules.sharding import OpSharding, representative_numel
from passes.rules.table import rule_of
from passes.specialize import class_key, localize
from tests.rule_samples import Input, Sample, inputs_of

__all__ = ["Case", "result_shapes", "rules_of", "solved"]

TOLERANCE = 1e-12
"""Float64: sums of a few dozen terms in another order differ by less."""

NUM_BOUNDARIES = 5
_TERMS_SEED = 1_000_003
"""Terms are drawn from another stream than values: a first term equal to the value would leave zeros for the rest."""
_PROBES = (1013, 7)


def rules_of(sample: Sample) -> list[OpSharding]:
    """Returns the alternatives of the sample's rule."""
    return rule_of(_graph(sample))


def solved(
    sample: Sample,
    rules: Sequence[OpSharding],
    annotations: Sequence[Annotation | None],
    ranks: tuple[int, ...],
    wanted: Sequence[Annotation | None] = (),
) -> Solution:
    """Returns what `rules` say of inputs under `annotations`."""
    numels = [representative_numel(given.shape) for given in inputs_of(sample)]
    return solve(rules, annotations, ranks, numels, [False] * len(numels), wanted)


@dataclass(frozen=True, slots=True)
class Case:
    """A sample at concrete sizes, with values and the plain result."""

    sample: Sample
    tokens: int
    values: tuple[Tensor, ...]
    expected: tuple[Tensor | None, ...]

    @staticmethod
    def make(sample: Sample, tokens: int, seed: int = 0) -> Case:
        generator = torch.Generator().manual_seed(seed)
        values = tuple(
            given.make(evaluate_shape(given.shape, tokens, NUM_BOUNDARIES), generator) for given in inputs_of(sample)
        )
        return Case(sample, tokens, values, _results(_call(sample, values, tokens)))

    def error(self, required: Sequence[Annotation], outputs: Sequence[Annotation | None], seed: int = 0) -> str | None:
        """Returns how the recombined result differs from the plain one, or None."""
        local = self.run(required, outputs, seed)
        return next(
            (
                f"output {number}: {problem}"
                for number, (expected, annotation) in enumerate(zip(self.expected, outputs, strict=False))
                if expected is not None
                and annotation is not None
                and (problem := self.compare(number, annotation, local)) is not None
            ),
            None,
        )

    def compare(self, number: int, annotation: Annotation, local: Mapping[int, Sequence[Tensor | None]]) -> str | None:
        """Returns how one recombined output differs from the plain one, or None."""
        expected = self.expected[number]
        assert expected is not None
        pieces = shard_map(annotation, expected.shape)
        return _compare(pieces, {rank: held[number] for rank, held in local.items()}, expected, self.sample)

    def run(
        self, required: Sequence[Annotation], outputs: Sequence[Annotation | None], seed: int = 0
    ) -> dict[int, list[Tensor | None]]:
        """Returns the local results of each rank; inputs are cut as `required`, partial ones into random terms."""
        generator = torch.Generator().manual_seed(seed + _TERMS_SEED)
        held = [_cut(value, annotation, generator) for value, annotation in zip(self.values, required, strict=True)]
        node = _graph(self.sample, required, outputs)
        programs: dict[Any, tuple[Program, Mapping[str, Any]]] = {}
        results: dict[int, list[Tensor | None]] = {}
        for rank in required[0].ranks if required else next(a for a in outputs if a is not None).ranks:
            key = class_key([node.graph], rank)
            if key not in programs:
                local = localize(node.graph, rank, {}, lambda name: _no_parameter(name))
                programs[key] = compile_program(local.graph, ()), local.coordinates
            program, coordinates = programs[key]
            inputs: dict[str, Any] = {f"operator:x{number}": pieces[rank] for number, pieces in enumerate(held)}
            inputs |= {"num_tokens": self.tokens, "num_boundaries": NUM_BOUNDARIES}
            inputs |= {name: value(rank) for name, value in coordinates.items()}
            results[rank] = _run(program, inputs, len(self.expected))
        return results


def _no_parameter(name: str) -> Annotation:
    raise AssertionError(f"{name}: samples have no parameters")


def _run(program: Program, inputs: dict[str, Any], count: int) -> list[Tensor | None]:
    def refuse(*_: Any) -> Any:
        raise AssertionError("one operator neither communicates nor has a gradient of a parameter")

    try:
        next(program.run(inputs, refuse, refuse))
    except StopIteration as stop:
        return [stop.value.get(f"y{number}") for number in range(count)]
    raise AssertionError("a program of one operator yielded")


def _graph(sample: Sample, required: Sequence[Annotation] = (), outputs: Sequence[Annotation | None] = ()) -> fx.Node:
    """Returns the node of the sample in a graph of its own, with the facts that passes leave on it."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for number, given in enumerate(inputs_of(sample)):
        node = graph.placeholder(f"x{number}")
        dtype = _dtype(given)
        annotations = (required[number],) if required else ()
        nodes.append(
            set_info(node, NodeInfo(shapes=(given.shape,), dtypes=(dtype,), name=f"x{number}", annotations=annotations))
        )
    remaining = iter(nodes)
    node = graph.call_function(sample.target, _mapped(sample.args, lambda _: next(remaining), str), dict(sample.kwargs))
    shapes, dtypes = _result_facts(sample)
    annotations = tuple(outputs) if outputs else ()
    annotations += (None,) * (len(shapes) - len(annotations)) if outputs else ()
    facts = NodeInfo(shapes=shapes, dtypes=dtypes, required=tuple(required), annotations=annotations)
    set_info(node, facts)
    results = {"y0": node}
    if len(shapes) > 1:
        results = {}
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            if shape is None:
                continue
            results[f"y{number}"] = graph.call_function(operator.getitem, (node, number))
            own = annotations[number : number + 1]
            set_info(results[f"y{number}"], NodeInfo(shapes=(shape,), dtypes=(dtype,), annotations=own))
    graph.output(results)
    return node


def _mapped(value: Any, tensor: Any, size: Any) -> Any:
    if isinstance(value, Input):
        return tensor(value)
    if isinstance(value, sympy.Expr):
        return size(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, tensor, size) for item in value)
    return value


def _call(sample: Sample, values: Iterable[Tensor], tokens: int, device: str = "cpu") -> Any:
    remaining = iter(values)
    sizes = {TOKENS: tokens, BOUNDARIES: NUM_BOUNDARIES}
    args = _mapped(sample.args, lambda _: next(remaining), lambda size: int(size.subs(sizes)))
    kwargs = dict(sample.kwargs)
    if device == "meta" and "dtype" in kwargs and not inputs_of(sample):
        kwargs["device"] = device
    return sample.target(*args, **kwargs)


def _results(value: Any) -> tuple[Tensor | None, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def result_shapes(sample: Sample) -> tuple[Shape | None, ...]:
    """Returns the shapes of the results, symbolic where those of the inputs are."""
    return _result_facts(sample)[0]


def _result_facts(sample: Sample) -> tuple[tuple[Shape | None, ...], tuple[torch.dtype | None, ...]]:
    """Returns shapes and dtypes of the results, with symbolic sizes: found by running at sizes that are primes."""
    values = [
        torch.empty(evaluate_shape(given.shape, *_PROBES), dtype=_dtype(given), device="meta")
        for given in inputs_of(sample)
    ]
    results = _results(_call(sample, values, _PROBES[0], "meta"))
    return (
        tuple(None if result is None else _symbolic(result.shape, sample) for result in results),
        tuple(None if result is None else result.dtype for result in results),
    )


def _dtype(given: Input) -> torch.dtype:
    return given.make((1,) * len(given.shape), torch.Generator()).dtype


def _symbolic(shape: Sequence[int], sample: Sample) -> Shape:
    if not sample.is_symbolic:
        return tuple(shape)
    probe = _PROBES[0]
    return tuple(size if size % probe or not size else TOKENS * (size // probe) for size in shape)


def _cut(value: Tensor, annotation: Annotation, generator: torch.Generator) -> dict[int, Tensor]:
    """Returns what each rank holds of `value`."""
    pieces = shard_map(annotation, value.shape)
    families: dict[int, dict[int, Tensor]] = {}
    for family in {piece.family for piece in pieces.pieces}:
        terms = sorted({piece.term for piece in pieces.pieces if piece.family == family})
        families[family] = dict(zip(terms, _terms(value, len(terms), annotation.reduce, generator), strict=True))
    return {piece.rank: families[piece.family][piece.term][_slices(piece.box)].clone() for piece in pieces.pieces}


def _terms(value: Tensor, count: int, reduce: str | None, generator: torch.Generator) -> list[Tensor]:
    """Returns random tensors whose sum (or maximum) is `value`."""
    if count == 1:
        return [value]
    if reduce == "max":
        holder = torch.randint(0, count, value.shape, generator=generator)
        return [torch.where(holder == number, value, value - 1 - number) for number in range(count)]
    others = [torch.randint(-64, 65, value.shape, generator=generator).to(value.dtype) / 32 for _ in range(count - 1)]
    return [*others, value - sum(others)]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _compare(pieces: ShardMap, local: Mapping[int, Tensor | None], expected: Tensor, sample: Sample) -> str | None:
    for piece in pieces.pieces:
        value = local[piece.rank]
        lengths = tuple(stop - start for start, stop in piece.box)
        if value is None or tuple(value.shape) != lengths or value.dtype != expected.dtype:
            got = "nothing" if value is None else f"{value.dtype}{list(value.shape)}"
            return f"rank {piece.rank} expected {expected.dtype}{list(lengths)}, got {got}"
    if not sample.values_are_defined:
        return None
    covered = torch.zeros(expected.shape, dtype=torch.bool)
    for family in sorted({piece.family for piece in pieces.pieces}):
        own = [piece for piece in pieces.pieces if piece.family == family]
        if (problem := _compare_family(own, local, expected, pieces.reduce, covered)) is not None:
            return problem
    return None if bool(covered.all()) else "some elements are on no rank"


def _compare_family(
    pieces: Sequence[Piece],
    local: Mapping[int, Tensor | None],
    expected: Tensor,
    reduce: str | None,
    covered: Tensor,
) -> str | None:
    bound = TOLERANCE * (1 + expected.double().abs().max().item() if expected.numel() else 1)
    total = torch.full(expected.shape, -torch.inf if reduce == "max" else 0, dtype=torch.float64)
    reached = torch.zeros(expected.shape, dtype=torch.bool)
    for term in sorted({piece.term for piece in pieces}):
        value = torch.zeros(expected.shape, dtype=torch.float64)
        seen = torch.zeros(expected.shape, dtype=torch.bool)
        for piece in (piece for piece in pieces if piece.term == term):
            local_value, at = local[piece.rank], _slices(piece.box)
            assert local_value is not None
            held = local_value.double()
            # The kernels round elements by their place in memory, so copies in pieces of other lengths may differ.
            equal = (value[at] == held) | ((value[at] - held).abs() <= bound)
            if not bool((equal | ~seen[at]).all()):
                return f"rank {piece.rank} differs from another copy of the same elements"
            value[at], seen[at] = held, True
        total = torch.maximum(total, value.masked_fill(~seen, -torch.inf)) if reduce == "max" else total + value
        reached |= seen
    covered |= reached
    difference = (total - expected.double()).abs().masked_fill(~reached, 0)
    if not bool((difference <= bound).all()):
        return f"differs by {difference.max().item()}"
    return None
