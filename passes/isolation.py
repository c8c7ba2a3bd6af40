"""Isolation: no token may see a token of another document, whatever the batch.

A forward value that depends on tokens has them along one dim, perhaps merged with others: the dim's length is
`major * T * minor`. This place is followed through every operator. Only packed attention may look along it, with the
batch's own borders; only sums at the end of the loss may contract it, and from there on the loss must stay a sum over
tokens, so that those of micro-batches add up.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Set
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from hgraph.errors import CaptureError
from hgraph.graph import BOUNDARIES, TOKENS, Shape, info, neighbourhood, tensor_inputs, where
from passes.rules.sharding import Dims, OpSharding, letters_of
from passes.rules.table import RULES, rule_of

__all__ = ["check_isolation"]

aten = torch.ops.aten
_ATTENTION = torch.ops.hydraulis.packed_attention.default
_MAY_SUM = (aten.sum.dim_IntList, aten.sum.default, aten.nll_loss_forward.default)
_SUMS_OF_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
_LINEAR = (
    *_MAY_SUM,
    aten.neg.default,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten._to_copy.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    operator.getitem,
)


@dataclass(frozen=True, slots=True)
class TokenDim:
    """Where the tokens of a value are: dim `dim`, of length `major * T * minor`, tokens in the middle."""

    dim: int
    major: int = 1
    minor: int = 1


def check_isolation(graph: fx.Graph) -> None:
    """Raises `CaptureError` where a token's value could depend on another document, or the loss is no sum."""
    places: dict[fx.Node, TokenDim | None] = {}
    summed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            places[node] = _place_of_input(node)
            if info(node).name == "cu_seqlens" and info(node).role == "input":
                _check_borders(node)
        elif node.op == "call_function" and info(node).phase == "forward":
            _check(node, places, summed)


def _place_of_input(node: fx.Node) -> TokenDim | None:
    facts = info(node)
    return TokenDim(0) if facts.role == "input" and facts.shape and facts.shape[0] == TOKENS else None


def _check_borders(node: fx.Node) -> None:
    for user in node.users:
        if info(user).phase == "forward" and user.target != _ATTENTION:
            _leak(user, "computes with the borders of documents, which differ with the packing")


def _check(node: fx.Node, places: dict[fx.Node, TokenDim | None], summed: set[fx.Node]) -> None:
    for shape in info(node).shapes:
        if shape is not None and sum(1 for size in shape if not isinstance(size, int)) > 1:
            _leak(node, "relates every token to every other")
    if any(value in summed for value in node.all_input_nodes):
        _check_sum(node, summed)
        summed.add(node)
        places[node] = None
    elif node.target is operator.getitem:
        places[node] = places.get(node.args[0])  # type: ignore[arg-type]
    elif node.target == _ATTENTION:
        _check_attention(node, places)
        places[node] = TokenDim(0)
    elif node.target == aten.reshape.default:
        places[node] = _reshaped(node, places)
    elif node.target in RULES:
        _follow(node, places, summed)


def _check_attention(node: fx.Node, places: dict[fx.Node, TokenDim | None]) -> None:
    query, key, value, borders = (argument for argument in node.args[:4] if isinstance(argument, fx.Node))
    for name, argument in (("queries", query), ("keys", key), ("values", value)):
        shape = info(argument).shape
        if places.get(argument) != TokenDim(0) or shape[0] != TOKENS or not isinstance(shape[1], int):
            _leak(node, f"gets {name} that are not one per token, [..., heads, tokens, head size]")
    heads, keys = info(query).shape[1], info(key).shape[1]
    if int(heads) % int(keys):
        _leak(node, f"gets {heads} query heads over {keys} key heads, which do not divide")
    if info(borders).role != "input" or info(borders).name != "cu_seqlens":
        _leak(node, "gets borders that are not packed.cu_seqlens")


def _reshaped(node: fx.Node, places: dict[fx.Node, TokenDim | None]) -> TokenDim | None:
    """Where tokens are after a reshape: as many elements before and after them as there were."""
    (source,) = tensor_inputs(node)
    place, old, new = places.get(source), info(source).shape, info(node).shape
    if place is None:
        return _created(new)
    before = _product(old[: place.dim]) * place.major
    after = place.minor * _product(old[place.dim + 1 :])
    for dim, length in _token_dims(new):
        factor = _factor(length)
        major, rest = divmod(before, max(1, _product(new[:dim])))
        if rest or not major or factor % major:
            continue
        found = TokenDim(dim, major, factor // major)
        if found.minor * _product(new[dim + 1 :]) == after:
            return found
    _leak(node, "regroups tokens, so that values of different tokens meet in one row; transpose first")
    return None


def _follow(node: fx.Node, places: dict[fx.Node, TokenDim | None], summed: set[fx.Node]) -> None:
    """Follows the letter of the token dim through an operator."""
    rule = rule_of(node)[0]
    letters: dict[str, tuple[int, int]] = {}
    for dims, value in zip(rule.inputs, tensor_inputs(node), strict=True):
        place = places.get(value)
        if place is None:
            continue
        for letter in dims[place.dim]:
            if letters.setdefault(letter, (place.major, place.minor)) != (place.major, place.minor):
                _leak(node, "joins tokens that are laid out differently")
    if set(letters) & rule.fixed:
        _leak(node, "reads along the token dim")
    kept = {letter for dims in rule.outputs if dims is not None for letter in letters_of(dims)}
    if _lengths_by_sequence(rule) - kept or set(letters) - kept:
        if node.target not in _MAY_SUM:
            _leak(node, "contracts the token dim")
        summed.add(node)
        places[node] = None
        return
    output = next(dims for dims in rule.outputs if dims is not None)
    places[node] = _place_of_letters(output, letters) or _created(info(node).shape)


def _lengths_by_sequence(rule: OpSharding) -> set[str]:
    """The letters of dims that have one entry per sequence."""
    used = {letter for dims in rule.inputs for letter in letters_of(dims)}
    return {x for x in used if not isinstance(rule.sizes[x], int) and sympy.sympify(rule.sizes[x]).has(BOUNDARIES)}


def _place_of_letters(output: Dims, letters: dict[str, tuple[int, int]]) -> TokenDim | None:
    for dim, own in enumerate(output):
        for letter in own:
            if letter in letters:
                return TokenDim(dim, *letters[letter])
    return None


def _created(shape: Shape) -> TokenDim | None:
    """The place of a value made from constants alone: it is the same for all tokens."""
    return next((TokenDim(dim, 1, _factor(length)) for dim, length in _token_dims(shape)), None)


def _token_dims(shape: Shape) -> Iterator[tuple[int, sympy.Expr]]:
    for dim, length in enumerate(shape):
        if not isinstance(length, int) and length.has(TOKENS):
            yield dim, length


def _factor(length: sympy.Expr) -> int:
    """k of a length k * T."""
    ratio = sympy.cancel(length / TOKENS)
    return int(ratio) if ratio.is_Integer else 0


def _product(lengths: Shape) -> int:
    return math.prod(length for length in lengths if isinstance(length, int))


def _check_sum(node: fx.Node, summed: Set[fx.Node]) -> None:
    """Raises where what follows a sum over tokens is no sum over tokens."""
    if any(not isinstance(size, int) for shape in info(node).shapes if shape is not None for size in shape):
        _leak(node, "gives every token a sum over all tokens")
    values = [argument for argument in node.args[:2] if isinstance(argument, fx.Node | int | float)]
    of_tokens = [value in summed for value in values]
    if node.target in _LINEAR or (node.target in _SUMS_OF_SUMS and all(of_tokens)):
        return
    scaled = [[True, False]] if node.target == aten.div.Tensor else [[True, False], [False, True]]
    if node.target in _SCALINGS and of_tokens in scaled:
        return
    raise CaptureError(
        f"the loss is not a sum over tokens: {where(node)} follows a sum over the tokens of a micro-batch, so that "
        "losses of micro-batches would not add up. Return a plain sum over labelled tokens; the division by their "
        f"number in the whole step is done for you. Around it:\n{neighbourhood(node)}"
    )


def _leak(node: fx.Node, what: str) -> None:
    raise CaptureError(
        f"documents would see each other: {where(node)} {what}. Use scaled_dot_product_attention(..., is_causal=True), "
        "or packed_attention of hgraph.packed_attention, which keep documents apart, and per-token operators "
        f"elsewhere. Around it:\n{neighbourhood(node)}"
    )
