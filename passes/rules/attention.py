"""Rules of packed attention: heads may be split, tokens may not.

Query heads are (k g): key/value head major, position in its group minor. While whole groups stay together all of q, k
and v are split; a split through a group keeps k and v whole, and their gradients become partial.
"""

from __future__ import annotations

from torch import fx

from hgraph.graph import Size, info, tensor_inputs
from passes.rules.sharding import Dims, OpSharding

__all__ = ["packed_attention", "packed_attention_backward"]


def packed_attention(node: fx.Node) -> list[OpSharding]:
    """query [T, H, D], key [T, K, D], value [T, K, E], cu_seqlens -> output [T, H, E], log-sum-exp [T, H]."""
    query, key, value = _grouped("d"), _key("k", "d"), _key("k", "e")
    whole = OpSharding(
        (query, key, value, (("s",),)),
        (_grouped("e"), (("t",), ("k", "g"))),
        _sizes(node),
        frozenset("tdes"),
    )
    split = OpSharding(
        (_key("h", "d"), _key("m", "d"), _key("m", "e"), (("s",),)),
        (_key("h", "e"), (("t",), ("h",))),
        _sizes(node),
        frozenset("tdesm"),
    )
    return _without_ones([whole, split])


def packed_attention_backward(node: fx.Node) -> list[OpSharding]:
    """grad, q, k, v, output, log-sum-exp, cu_seqlens -> gradients of q, k, v."""
    out: Dims = _grouped("e")
    lse: Dims = (("t",), ("k", "g"))
    whole = OpSharding(
        (out, _grouped("d"), _key("k", "d"), _key("k", "e"), out, lse, (("s",),)),
        (_grouped("d"), _key("k", "d"), _key("k", "e")),
        _sizes(node),
        frozenset("tdes"),
    )
    out, lse = _key("h", "e"), (("t",), ("h",))
    split = OpSharding(
        (out, _key("h", "d"), _key("m", "d"), _key("m", "e"), out, lse, (("s",),)),
        (_key("h", "d"), _key("m", "d"), _key("m", "e")),
        _sizes(node),
        frozenset("tdesm"),
        contraction="sum",
    )
    return _without_ones([whole, split])


def _grouped(inner: str) -> Dims:
    return (("t",), ("k", "g"), (inner,))


def _key(heads: str, inner: str) -> Dims:
    return (("t",), (heads,), (inner,))


def _sizes(node: fx.Node) -> dict[str, Size]:
    first = 1 if "backward" in str(node.target) else 0
    shapes = [info(argument).shape for argument in tensor_inputs(node)]
    query, key, value, boundaries = *shapes[first : first + 3], shapes[-1]
    heads, keys = query[1], key[1]
    assert isinstance(heads, int) and isinstance(keys, int), "numbers of heads are static"
    return {
        "t": query[0],
        "h": heads,
        "k": keys,
        "m": keys,
        "g": heads // keys,
        "d": query[2],
        "e": value[2],
        "s": boundaries[0],
    }


def _without_ones(rules: list[OpSharding]) -> list[OpSharding]:
    """Letters of size 1 cannot be split and are left out, so that they do not hide the letter behind them."""
    result = []
    for rule in rules:
        ones = {letter for letter, size in rule.sizes.items() if size == 1}

        def strip(dims: Dims | None, ones: set[str] = ones) -> Dims:
            assert dims is not None
            return tuple(tuple(letter for letter in dim if letter not in ones) for dim in dims)

        result.append(
            OpSharding(
                tuple(map(strip, rule.inputs)),
                tuple(map(strip, rule.outputs)),
                rule.sizes,
                rule.fixed,
                rule.contraction,
                rule.linear,
            )
        )
    return result
