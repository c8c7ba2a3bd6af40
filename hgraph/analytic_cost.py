"""Costs of schemes that nobody measured, from sizes and speeds: FLOPs, bytes, links.

For a decoder with L layers, hidden H, feed-forward F, vocabulary V, of which a stage has l layers, a micro-batch in one
stage slot (forward and backward) is taken to cost, per rank,

    attention   7 l H s^2 / (tp cp)                 FLOPs for each sequence: 2 matrix products over half the square
                                                    forward, 5 backward (they compute the scores again)
    matrices    6 P s / (tp cp)                     FLOPs for each token; P: weights of the stage, head and embedding
                                                    shared out over the stages
    exchange    tp: 8 collectives a layer of 2 H s / cp bytes; cp: keys and values gathered and their gradients reduced,
                or, where the heads divide and it moves less, tokens exchanged for heads (all-to-all)
    fixed       l, l / tp, and the latencies of the messages of l layers, for each micro-batch (closed form; the
                programs of a model say the numbers of operators and the bytes of weights instead)

The factors (ms per FLOP, ms per ideal ms of the links, ms per layer) are fitted to the measured schemes of the file
(`hgraph/cost_fit.py`); then a, b and c of each tensor-parallel degree that was measured are pulled towards what was
measured there. Not counted: transfers between stages (below 1 % at the published sizes), and any overlap of exchange
with computation under cp, so that cp looks too slow rather than too fast.

Reference for the work of a layer: Narayanan et al., arXiv 2104.04473; for the collectives: Korthikanti et al., arXiv
2205.05198; for attention backward: Dao, arXiv 2307.08691; for cp: Jacobs et al., arXiv 2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hgraph.cost_fit import fit_nonnegative, relative_errors
from hgraph.errors import InvalidInput
from hgraph.memory_model import MemoryModel, ModelSizes, SchemeMemory, TransformerMemory
from hgraph.scheme_profile import FitError, ProfileFile, SchemeProfile
from hgraph.scheme_text import parse_scheme
from hgraph.strategy import Scheme, Stage
from hgraph.topology import Node, Topology

__all__ = [
    "FEATURES",
    "CostModel",
    "Work",
    "calibrated",
    "closed_form",
    "extrapolation_error",
    "features",
    "with_analytic",
]

Floats = NDArray[np.float64]

FEATURES = ("attention", "matrices", "memory", "exchange", "launches", "weights", "latency")
"""Amounts of work: FLOPs for each token^2; FLOPs, bytes and ideal ms for each token; and for each micro-batch."""
_A, _B, _C = slice(0, 1), slice(1, 4), slice(4, 7)
"""Which features make up a, b and c."""

_ASSUMED_UTILISATION = {"attention": 0.4, "matrices": 0.6}
_ASSUMED = {"memory": 0.0, "exchange": 1.25, "launches": 1.0, "weights": 0.0, "latency": 1.0}
"""Factors where nothing was measured that would tell: links reach 80 %, a layer's launches take a millisecond."""

_LONGEST = 32_768
_HALVINGS = 8
_MANY_RANKS = 2**20
_PULL = 0.03
"""How much a factor that moves a degree's a, b, c away from the model counts, beside a point's relative error."""


@dataclass(frozen=True, slots=True)
class Work:
    """Where the work and the memory of a scheme are known from: `FEATURES` of each stage, and bytes of each stage.

    `memory` gives none where the profile's own closed form knows it.
    """

    features: Callable[[Scheme], Sequence[Floats]]
    memory: Callable[[Scheme], tuple[SchemeMemory, ...]]


@dataclass(frozen=True, slots=True)
class CostModel:
    """A calibrated model: `factors` of `FEATURES`, and by tp what a, b and c are multiplied by."""

    work: Work
    factors: tuple[float, ...]
    corrections: Mapping[int, tuple[float, float, float]] = field(default_factory=dict)

    def coefficients(self, scheme: Scheme) -> tuple[float, float, float]:
        """Returns a, b, c of a scheme: of each the largest over its stages."""
        found = []
        for stage, row in zip(scheme.stages, self.work.features(scheme), strict=True):
            parts = row * np.array(self.factors)
            own = self.corrections.get(stage.tp, (1.0, 1.0, 1.0))
            found.append([own[0] * parts[_A].sum(), own[1] * parts[_B].sum(), own[2] * parts[_C].sum()])
        a, b, c = np.max(found, axis=0)
        return float(a), float(b), float(c)


def closed_form(profile: ProfileFile, topology: Topology) -> Work:
    """Returns the work of a decoder with the sizes of the profile, over the links of `topology`."""
    if profile.model is None:
        raise InvalidInput("analytic costs: expected a profile with the sizes of its `model`, got one without")
    sizes = profile.model
    return Work(lambda scheme: features(scheme, sizes, topology), lambda scheme: _own_memory(profile, scheme))


def with_analytic(
    profile: ProfileFile, schemes: Iterable[Scheme | str], topology: Topology, *, work: Work | None = None
) -> ProfileFile:
    """Returns `profile` with costs and memory of `schemes` added, marked `analytic`; those it has stay as they are.

    The model is calibrated by the measured schemes of the profile, taken to have run on `topology`; `fit` of what is
    added says how far it is off at measured schemes that it did not see. `work` replaces the closed form. Raises
    `InvalidInput` where sizes are missing or a scheme does not fit the topology.
    """
    wanted = [parse_scheme(each) if isinstance(each, str) else each for each in schemes]
    new = {str(scheme): scheme for scheme in wanted if str(scheme) not in profile.schemes}
    if not new:
        return profile
    work = work or closed_form(profile, topology)
    model, error = calibrated(profile, work), extrapolation_error(profile, work)
    profile = _with_activations(profile, [stage.tp for scheme in new.values() for stage in scheme.stages])
    added = {
        name: SchemeProfile(*model.coefficients(scheme), "analytic", None, work.memory(scheme), error)
        for name, scheme in new.items()
    }
    return replace(profile, schemes={**profile.schemes, **added})


def calibrated(profile: ProfileFile, work: Work, *, without: str | None = None) -> CostModel:
    """Returns the model as the measured schemes of the profile have it, one of them left out if `without` says so."""
    names = [name for name, own in profile.schemes.items() if own.origin == "measured" and name != without]
    found = [_points(profile, name, work) for name in names]
    points = [each for each in found if len(each.ms)]
    if not points:
        return CostModel(work, _assumed(profile))
    rows, ms = np.vstack([each.rows for each in points]), np.concatenate([each.ms for each in points])
    factors = fit_nonnegative(rows, ms)
    unknown = ~rows.any(axis=0)
    factors[unknown] = np.array([_ASSUMED.get(name, 0.0) for name in FEATURES])[unknown]
    return CostModel(work, tuple(map(float, factors)), _corrections(points, factors))


def extrapolation_error(profile: ProfileFile, work: Work) -> FitError | None:
    """Returns how far the model is off at each measured scheme when calibrated by the others; None for fewer than two.

    Points are micro-batches of one sequence, from the scheme's limit (at most 32,768 tokens) down by halves.
    """
    names = [name for name, own in profile.schemes.items() if own.origin == "measured"]
    points = {name: _points(profile, name, work) for name in names}
    names = [name for name in names if len(points[name].ms)]
    if len(names) < 2:
        return None
    errors = []
    for name in names:
        a, b, c = calibrated(profile, work, without=name).coefficients(parse_scheme(name))
        lengths = points[name].lengths
        errors.append(relative_errors((a * lengths + b) * lengths + c, points[name].ms))
    joined = np.concatenate(errors)
    return FitError(round(float(np.median(joined)), 4), round(float(joined.max()), 4), len(joined))


def features(scheme: Scheme, model: ModelSizes, topology: Topology) -> list[Floats]:
    """Returns the amounts of `FEATURES` for each stage of a decoder: the closed form at the top of this module."""
    if scheme.num_ranks > topology.num_ranks:
        raise InvalidInput(
            f"scheme {scheme}: expected a cluster of {scheme.num_ranks} ranks or more, got {topology.name} with "
            f"{topology.num_ranks}"
        )
    split = _layers(scheme, model)
    return [
        _stage_features(stage, layers, scheme.pp, model, topology.nodes[0])
        for stage, layers in zip(scheme.stages, split, strict=True)
    ]


def _layers(scheme: Scheme, model: ModelSizes) -> Sequence[float]:
    """Layers by stage; where the file does not say, the mean, as the published fits have it."""
    if scheme.stages[0].layers is None:
        return [model.layers / scheme.pp] * scheme.pp
    return scheme.layer_split(model.layers)


def _stage_features(stage: Stage, layers: float, pp: int, model: ModelSizes, node: Node) -> Floats:
    hidden, key_value = model.hidden, model.hidden * (model.kv_heads or model.heads) / model.heads
    matrices = 2 * hidden**2 + 2 * hidden * key_value + (3 if model.gated else 2) * hidden * model.ffn_hidden
    weights = layers * matrices + hidden * model.vocab / pp
    ranks, latency_ms = stage.tp * stage.cp, _latency_ms(stage, node)
    exchange_ms = 8 * layers * _ring_ms(node, 2 * hidden / stage.cp, stage.tp, 1)
    cp_ms, cp_messages = _context_exchange(stage, model, key_value, node)
    return np.array(
        [
            7 * layers * hidden / ranks,
            6 * weights / ranks,
            0.0,
            exchange_ms + layers * cp_ms,
            layers,
            layers / stage.tp,
            layers * latency_ms * (8 * (stage.tp - 1) + cp_messages),
        ]
    )


def _context_exchange(stage: Stage, model: ModelSizes, key_value: float, node: Node) -> tuple[float, int]:
    """Returns ms per token and layer, and messages a layer, of what context parallelism moves."""
    if stage.cp == 1:
        return 0.0, 0
    gathered_ms = 3 * _ring_ms(node, 2 * 2 * key_value / stage.tp, stage.cp, stage.tp)
    heads = model.heads // stage.tp
    own_key_values = (model.kv_heads or model.heads) / stage.tp
    if heads % stage.cp or own_key_values % stage.cp:
        return gathered_ms, 3 * (stage.cp - 1)
    moved = 2 * (2 * model.hidden + 2 * key_value) / (stage.tp * stage.cp)
    exchanged_ms = 2 * _all_to_all_ms(node, moved, stage.cp, stage.tp)
    return (exchanged_ms, 8 * (stage.cp - 1)) if exchanged_ms < gathered_ms else (gathered_ms, 3 * (stage.cp - 1))


def _ring_ms(node: Node, num_bytes: float, group: int, stride: int) -> float:
    """Milliseconds in which each of `group` ranks gets `num_bytes` in all, by a ring that enters each node once.

    Members are `stride` ranks apart; groups side by side in a node do the same at the same time.
    """
    moved = num_bytes * (group - 1) / group
    inside, groups, network_gb_s = _shares(node, group, stride)
    local_ms = moved / node.local.bandwidth_gb_s / 1e6
    if inside >= group:
        return local_ms
    return max(local_ms, moved * groups / network_gb_s / 1e6)


def _all_to_all_ms(node: Node, num_bytes: float, group: int, stride: int) -> float:
    """Milliseconds in which each of `group` ranks sends `num_bytes`, an equal part to each member."""
    inside, groups, network_gb_s = _shares(node, group, stride)
    local_ms = num_bytes * (inside - 1) / group / node.local.bandwidth_gb_s / 1e6
    leaving = num_bytes * (group - inside) / group * inside * groups
    return max(local_ms, leaving / network_gb_s / 1e6)


def _shares(node: Node, group: int, stride: int) -> tuple[int, int, float]:
    """Returns a group's ranks in a node, the groups in a node, and the bandwidth of all its network ports together."""
    size = len(node.ranks)
    inside = min(group, max(1, size // stride))
    return inside, max(1, size // inside), size // node.ranks_per_port * node.network.bandwidth_gb_s


def _latency_ms(stage: Stage, node: Node) -> float:
    across = stage.num_ranks > len(node.ranks)
    return (node.network.latency_us if across else node.local.latency_us) / 1e3


@dataclass(frozen=True, slots=True)
class _Points:
    """Micro-batches of one measured scheme: a row of features and ms for each length."""

    tp: int
    lengths: Floats
    rows: Floats
    ms: Floats


def _points(profile: ProfileFile, name: str, work: Work) -> _Points:
    scheme, own = parse_scheme(name), profile.schemes[name]
    top = min(profile.max_tokens(name, _MANY_RANKS), _LONGEST)
    lengths = np.array([top >> halving for halving in range(_HALVINGS) if top >> halving > 0], dtype=np.float64)
    found = work.features(scheme)
    row = found[int(np.argmax([each[1] for each in found]))]
    powers = np.stack([lengths**2, *[lengths] * 3, *[np.ones_like(lengths)] * 3], axis=1)
    ms = (own.a * lengths + own.b) * lengths + own.c
    return _Points(scheme.stages[0].tp, lengths[ms > 0], (powers * row)[ms > 0], ms[ms > 0])


def _corrections(points: Sequence[_Points], factors: Floats) -> dict[int, tuple[float, float, float]]:
    """By tp, what a, b, c are multiplied by to come nearer to what was measured; 1 is free, all else costs."""
    result = {}
    for tp in sorted({each.tp for each in points}):
        rows = np.vstack([each.rows for each in points if each.tp == tp]) * factors
        ms = np.concatenate([each.ms for each in points if each.tp == tp])
        parts = np.stack([rows[:, part].sum(axis=1) for part in (_A, _B, _C)], axis=1)
        pull = _PULL * math.sqrt(len(ms)) * np.eye(3)
        matrix, wanted = np.vstack([parts / ms[:, None], pull]), np.concatenate([np.ones(len(ms)), pull.sum(axis=1)])
        multipliers = np.clip(np.linalg.lstsq(matrix, wanted, rcond=None)[0], 0.25, 4.0)
        result[tp] = (float(multipliers[0]), float(multipliers[1]), float(multipliers[2]))
    return result


def _assumed(profile: ProfileFile) -> tuple[float, ...]:
    if profile.device is None or profile.device.peak_tflops is None:
        raise InvalidInput(
            "analytic costs: expected a measured scheme with room for a token to calibrate by, or device.peak_tflops "
            "to assume from, got neither"
        )
    speed = {name: 1e-9 / (share * profile.device.peak_tflops) for name, share in _ASSUMED_UTILISATION.items()}
    return tuple((_ASSUMED | speed)[name] for name in FEATURES)


def _own_memory(profile: ProfileFile, scheme: Scheme) -> tuple[SchemeMemory, ...]:
    """Memory where there is no closed form: that of the same scheme without cp, whose activations cp shares out."""
    if profile.memory is not None and profile.memory.transformer is not None:
        return ()
    plain = Scheme(tuple(replace(stage, cp=1) for stage in scheme.stages), scheme.schedule, scheme.overrides)
    known = profile.schemes.get(str(plain))
    if known is None or not known.memory:
        raise InvalidInput(
            f"analytic costs: the memory of scheme {scheme} is not known; expected memory.transformer in the profile, "
            f"or fixed_bytes and token_bytes of {plain}"
        )
    cp = min(stage.cp for stage in scheme.stages)
    return tuple(SchemeMemory(stage.fixed_bytes, stage.token_bytes / cp) for stage in known.memory)


def _with_activations(profile: ProfileFile, degrees: Iterable[int]) -> ProfileFile:
    """Returns the profile with activation bytes for all `degrees`: on the line alpha + beta tp through those it has."""
    form = None if profile.memory is None else profile.memory.transformer
    missing = sorted(set(degrees) - set(form.activation_bytes)) if form is not None else []
    if form is None or not missing:
        return profile
    known = np.array(sorted(form.activation_bytes.items()), dtype=np.float64)
    line = fit_nonnegative(np.stack([np.ones(len(known)), known[:, 0]], axis=1), known[:, 1])
    added = {tp: round(float(line @ [1.0, tp]), 2) for tp in missing}
    activations = dict(sorted({**form.activation_bytes, **added}.items()))
    transformer = TransformerMemory(
        activations, form.state_bytes, form.optimizer_share, form.embedding_bytes, form.split_embedding_bytes
    )
    memory: MemoryModel | None = replace(profile.memory, transformer=transformer) if profile.memory else None
    note = f"analytic: activation bytes of {', '.join(f'tp{tp}' for tp in missing)}, on the line through the others"
    return replace(profile, memory=memory, notes=(*profile.notes, note))
