"""Memory of one rank in closed form: how many tokens a micro-batch may have under a scheme.

A rank of stage i of p (counted from 0) holds, for a micro-batch of T tokens:

- optimizer states, spread over all ranks of the job, whatever the scheme;
- weights and gradients of its stage in the compute layout, split over tp (and copied over cp);
- activations of up to p - i micro-batches, as 1F1B keeps them, split over tp and cp.

The limit is the largest T for which every stage fits into the budget, rounded down to a multiple.

Invariants
----------
- Sizes are above 0; shares lie between 0 and 1; budgets are above 0.
- Activation bytes are given for one tensor-parallel degree or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hgraph.errors import InvalidInput
from hgraph.strategy import Scheme

__all__ = ["MIB", "DeviceSizes", "MemoryModel", "ModelSizes", "SchemeMemory", "TransformerMemory"]

MIB = 2**20


def _check_positive(what: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not value > 0:
            raise InvalidInput(f"{what}: expected {name} above 0, got {value}")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder-only Transformer; `gated` says whether the feed-forward part has three matrices or two."""

    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    gated: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        names = ("layers", "hidden", "ffn_hidden", "heads", "vocab")
        _check_positive("model", {name: getattr(self, name) for name in names} | {"kv_heads": self.kv_heads or 1})


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """One device: usable memory, and how many of them a node has; `peak_tflops` of dense matrix products if known."""

    name: str
    memory_mib: float
    per_node: int
    peak_tflops: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        values = {"memory_mib": self.memory_mib, "per_node": self.per_node, "peak_tflops": self.peak_tflops or 1}
        _check_positive("device", values)


@dataclass(frozen=True, slots=True)
class SchemeMemory:
    """Bytes of the fullest rank of a stage: `fixed_bytes` + `token_bytes` for each token of a micro-batch.

    Optimizer states are not among them. `token_bytes` counts every micro-batch that is kept at once.
    """

    fixed_bytes: float
    token_bytes: float

    def __post_init__(self) -> None:
        if not self.fixed_bytes >= 0 or not self.token_bytes > 0:
            raise InvalidInput(
                "scheme memory: expected fixed_bytes of 0 or more and token_bytes above 0, got "
                f"{self.fixed_bytes} and {self.token_bytes}"
            )


@dataclass(frozen=True, slots=True)
class TransformerMemory:
    """A Transformer's memory in few constants (Hydraulis, arXiv 2412.07894, and its published cost model).

    `activation_bytes` by tp: per token, per hidden/tp, per layer. `state_bytes` per hidden^2 of a layer: weights,
    gradients, master weights and moments, of which `optimizer_share` lies in the optimizer layout. Embedding and head
    take `embedding_bytes` per hidden x vocab where one stage has both, else `split_embedding_bytes` in the first stage
    and in the last.
    """

    activation_bytes: Mapping[int, float]
    state_bytes: float
    optimizer_share: float
    embedding_bytes: float
    split_embedding_bytes: float

    def __post_init__(self) -> None:
        if not self.activation_bytes or min(self.activation_bytes) < 1 or not min(self.activation_bytes.values()) > 0:
            raise InvalidInput(
                f"memory: expected activation bytes above 0 by tp of 1 or more, got {dict(self.activation_bytes)}"
            )
        if not 0 <= self.optimizer_share <= 1:
            raise InvalidInput(f"memory: expected optimizer_share from 0 to 1, got {self.optimizer_share}")
        names = ("state_bytes", "embedding_bytes", "split_embedding_bytes")
        _check_positive("memory", {name: getattr(self, name) for name in names})

    def optimizer_bytes(self, model: ModelSizes) -> float:
        """Returns the bytes of all optimizer states, before they are spread."""
        layers = model.layers * model.hidden**2 * self.state_bytes
        return self.optimizer_share * (layers + model.hidden * model.vocab * self.embedding_bytes)

    def stages(self, scheme: Scheme, model: ModelSizes) -> list[SchemeMemory]:
        """Returns the memory of the ranks of each stage; raises `InvalidInput` for a tp without activation bytes."""
        split = scheme.layer_split(model.layers)
        result = []
        for number, (stage, layers) in enumerate(zip(scheme.stages, split, strict=True)):
            if stage.tp not in self.activation_bytes:
                known = ", ".join(f"tp{tp}" for tp in sorted(self.activation_bytes))
                raise InvalidInput(f"no activation bytes for tp{stage.tp}; they are given for {known}")
            states = layers * model.hidden**2 * self.state_bytes
            states += model.hidden * model.vocab * self._embedding_bytes(scheme.pp, number)
            per_token = layers * model.hidden / stage.num_ranks * self.activation_bytes[stage.tp]
            in_flight = scheme.pp - number
            result.append(SchemeMemory((1 - self.optimizer_share) * states / stage.tp, max(in_flight * per_token, 1.0)))
        return result

    def _embedding_bytes(self, pp: int, stage: int) -> float:
        if pp == 1:
            return self.embedding_bytes
        return self.split_embedding_bytes if stage in (0, pp - 1) else 0.0


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What a rank may use, and what is known of its use.

    The budget is `budget_mib`, or else the device's memory less `context_mib` (context, communicators) and
    `reserve_mib` (kept free). Limits are multiples of `token_multiple`. `optimizer_bytes` are those of all states
    before they are spread; `transformer` gives them, and the memory of schemes, in closed form.
    """

    budget_mib: float | None = None
    context_mib: float = 0.0
    reserve_mib: float = 0.0
    token_multiple: int = 1
    optimizer_bytes: float | None = None
    transformer: TransformerMemory | None = None
    source: str = ""

    def __post_init__(self) -> None:
        _check_positive("memory", {"budget_mib": self.budget_mib or 1, "token_multiple": self.token_multiple})

    def budget_bytes(self, device: DeviceSizes | None) -> float:
        """Returns the bytes that a rank may use; raises `InvalidInput` where neither budget nor device is known."""
        if self.budget_mib is not None:
            return self.budget_mib * MIB
        if device is None:
            raise InvalidInput("memory: expected budget_mib or the device's memory_mib, got neither")
        return (device.memory_mib - self.context_mib - self.reserve_mib) * MIB

    def token_limit(
        self,
        scheme: Scheme,
        num_ranks: int,
        own: Sequence[SchemeMemory],
        model: ModelSizes | None,
        device: DeviceSizes | None,
    ) -> int:
        """Returns the most tokens of a micro-batch in a job of `num_ranks`, 0 or less where there is no room for any.

        `own` is what is known of the stages of the scheme itself; without, it is what the closed form says.
        """
        budget = self.budget_bytes(device)
        total = self.optimizer_bytes
        if total is None:
            total = self.transformer.optimizer_bytes(model) if self.transformer is not None and model else 0.0
        room = budget - total / num_ranks
        limits = ((room - stage.fixed_bytes) / stage.token_bytes for stage in self._stages(scheme, own, model))
        return int(min(limits) // self.token_multiple * self.token_multiple)

    def _stages(self, scheme: Scheme, own: Sequence[SchemeMemory], model: ModelSizes | None) -> Iterable[SchemeMemory]:
        if own:
            return own
        if self.transformer is None or model is None:
            raise InvalidInput("its memory is not known; give max_tokens, or fixed_bytes and token_bytes")
        if scheme.schedule == "gpipe" and scheme.pp > 1:
            raise InvalidInput("schedule gpipe keeps all micro-batches of a step at once; give its max_tokens")
        return self.transformer.stages(scheme, model)
