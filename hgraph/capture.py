"""Capture: a user's module and loss become one joint forward/backward graph of ATen operators.

The graph has symbolic sizes for the number of tokens and of sequences, and remembers nothing of the batch it was
traced with: any guard is an error. One captured graph serves all strategies. Parameters may be on the meta device.

`torch._functorch.aot_autograd.aot_export_joint_with_descriptors` (torch 2.8 and later) is not public; this file is
the only one that calls it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from hgraph.attention_capture import attention_as_packed
from hgraph.data.packed import Packed
from hgraph.errors import CaptureError, HydraulisError
from hgraph.garbage import collector_paused
from hgraph.graph import BOUNDARIES, TOKENS, Shape, info
from hgraph.user_code import is_users, user_frame

__all__ = ["Captured", "LossFunction", "ParameterFacts", "capture"]

LossFunction = Callable[[nn.Module, Packed], Tensor]
"""`loss(model, packed)` returns the sum over labelled tokens, a scalar."""

_EXAMPLE_TOKENS = 24
_EXAMPLE_SEQUENCES = 3
_STANDARD_FIELDS = ("tokens", "positions", "labels", "cu_seqlens")


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """One distinct parameter; `names` are all names it goes by (more than one where weights are tied)."""

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Captured:
    """A joint graph and what its placeholders and outputs mean.

    Placeholders carry `role` and `name` in their `NodeInfo`. `outputs` says what each output of the graph is: `loss`
    for the loss sum, else the name a parameter is used by, for its gradient (None for inputs without gradient).
    `layers` is the path of the module list whose entries are the model's layers, or None. `buffers` holds the values
    of buffers (they are inputs of the graph).
    """

    graph: fx.Graph
    parameters: tuple[ParameterFacts, ...]
    buffers: Mapping[str, Tensor]
    outputs: tuple[str | None, ...]
    layers: str | None
    num_layers: int
    extra_fields: tuple[str, ...] = ()
    module_names: tuple[str, ...] = field(default=())


@collector_paused()
def capture(model: nn.Module, loss: LossFunction, *, fields: Mapping[str, Tensor] | None = None) -> Captured:
    """Returns the joint graph of `loss(model, packed)` for any packed batch.

    `fields` gives one example of each further per-token or per-sequence field that the loss reads from `packed.fields`
    (24 tokens, 3 sequences). Raises `CaptureError` naming the module and line where the graph would hold for some
    batches only.
    """
    parameters, buffers = _distinct_parameters(model), _buffers(model)
    env = _Conditions()
    fake_mode = FakeTensorMode(shape_env=env)
    example = _example(dict(fields or {}))
    inputs = {name: _fake(fake_mode, tensor) for name, tensor in example.items()}
    swapped = {name: _fake_parameter(fake_mode, tensor) for name, tensor in _state(model)}
    wrapper = _Loss(model, loss, tuple(example))
    with contextlib.ExitStack() as stack:
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(fake_mode)
        stack.enter_context(_module_names(model))
        stack.enter_context(nn.utils.stateless._reparametrize_module(model, swapped, tie_weights=False))
        joint = _trace(stack, wrapper, list(inputs.values()))
        _refuse_guards(env, inputs)
        buffers |= _lift_constants(joint.graph_module)
        graph = _describe(joint.graph_module.graph, inputs)
    return _captured(graph, model, parameters, buffers, tuple(fields or ()))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    buffers = {name: tensor for name, tensor in _state(model) if not isinstance(tensor, nn.Parameter)}
    for name, tensor in buffers.items():
        if tensor.device.type == "meta":
            raise CaptureError(
                f"buffer {name} is on the meta device, so its values are not known; build the model on the CPU, or "
                "give its buffers values. Parameters may stay on meta"
            )
    return buffers


class _Loss(nn.Module):
    """The traced function: fields in, loss sum out."""

    def __init__(self, model: nn.Module, loss: LossFunction, fields: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.fields = fields

    def forward(self, *values: Tensor) -> Tensor:
        named = dict(zip(self.fields, values, strict=True))
        standard = {name: named.pop(name) for name in _STANDARD_FIELDS}
        packed = Packed(**standard, fields=named)
        with _SourceLines(), attention_as_packed(self.model, packed.cu_seqlens):
            result = self.loss(self.model, packed)
        if not isinstance(result, Tensor) or result.numel() != 1:
            got = f"a tensor of {result.ndim} dim(s)" if isinstance(result, Tensor) else type(result).__name__
            raise CaptureError(f"loss(model, packed): expected a scalar, the sum over labelled tokens; got {got}")
        return result.reshape(())


class _Conditions(ShapeEnv):
    """Remembers the user's line of every condition on a size (torch knows lines of its own)."""

    def _get_sloc(self, *args: Any, **kwargs: Any) -> Any:
        place, frame = super()._get_sloc(*args, **kwargs), user_frame()
        return place if frame is None else replace(place, maybe_user_loc=f"{frame.filename}:{frame.lineno}")


class _SourceLines(TorchFunctionMode):
    """Records the user's line on every traced node (a plain trace has none)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (frame := user_frame()) is not None:
            fx_traceback.current_meta["stack_trace"] = f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        return func(*args, **(kwargs or {}))


def _trace(stack: contextlib.ExitStack, wrapper: nn.Module, inputs: list[Tensor]) -> Any:
    try:
        return aot_export_joint_with_descriptors(stack, wrapper, tuple(inputs))
    except HydraulisError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
        place = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown"
        module = _current_module()
        raise CaptureError(
            f"cannot trace {type(wrapper.model).__name__} into one graph: in module {module or '(root)'}, at {place}: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. "
            "Values that depend on the data (`.item()`, Python branches on tensors or on the number of tokens) cannot "
            "be part of the graph; compute them from packed.positions and packed.cu_seqlens instead"
        ) from error


def _refuse_guards(env: ShapeEnv, inputs: Mapping[str, Tensor]) -> None:
    kept = [guard for guard in env.guards if not _is_equality_of_counts(guard.expr)]
    if not kept:
        return
    symbols = _symbols(inputs)
    lines = [f"  {guard.expr.subs(symbols)} at {guard.sloc.maybe_user_loc or guard.sloc}" for guard in kept]
    raise CaptureError(
        f"the traced graph would hold for some batches only: {len(kept)} condition(s) on the number of tokens or "
        "sequences were met while tracing (T tokens, S1 - 1 sequences):\n" + "\n".join(lines) + "\nRemove the branch "
        "or the cut, or make it independent of sizes; labels are already shifted in packed.labels"
    )


def _is_equality_of_counts(expression: Any) -> bool:
    return isinstance(expression, sympy.Eq) and all(side.is_Symbol for side in expression.args)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by name; those of a module that is registered twice once, as a swap must be."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def _example(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    tokens = torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64)
    bounds = torch.linspace(0, _EXAMPLE_TOKENS, _EXAMPLE_SEQUENCES + 1).to(torch.int32)
    standard = {"tokens": tokens, "positions": tokens.clone(), "labels": tokens.clone(), "cu_seqlens": bounds}
    for name, tensor in fields.items():
        if name in standard:
            raise CaptureError(f"fields: {name!r} is a standard field of packed; choose another name")
        if tensor.shape[:1] not in ((_EXAMPLE_TOKENS,), (_EXAMPLE_SEQUENCES,)):
            raise CaptureError(
                f"fields: expected an example of {name!r} with {_EXAMPLE_TOKENS} entries (one per token) or "
                f"{_EXAMPLE_SEQUENCES} (one per sequence), got shape {list(tensor.shape)}"
            )
    return standard | fields


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    sizes = [DimDynamic.DUCK if dim == 0 else DimDynamic.STATIC for dim in range(tensor.ndim)]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _fake_parameter(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake on the CPU even where the tensor is on meta: everything on meta would trace to other operators."""
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


@contextlib.contextmanager
def _module_names(model: nn.Module) -> Iterator[None]:
    """Records the module path on every traced node (a plain trace has none)."""
    saved: list[Any] = []
    calls: dict[str, int] = {}

    def enter(path: str, module: nn.Module) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            saved.append(fx_traceback.current_meta.get("nn_module_stack"))
            calls[path] = calls.get(path, 0) + 1
            key = path if calls[path] == 1 else f"{path}@{calls[path]}"
            entry = {key: (path, type(module).__name__)}
            fx_traceback.current_meta["nn_module_stack"] = {**(saved[-1] or {}), **entry}

        return hook

    def leave(*_: Any) -> None:
        fx_traceback.current_meta["nn_module_stack"] = saved.pop() or {}

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path, module)))
        handles.append(module.register_forward_hook(leave, always_call=False))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _current_module() -> str:
    stack = fx_traceback.current_meta.get("nn_module_stack") or {}
    return next(reversed(stack.values()), ("", ""))[0] if stack else ""


def _lift_constants(module: fx.GraphModule) -> dict[str, Tensor]:
    """Turns tensors that the forward pass made from numbers into inputs like buffers; returns them by name."""
    constants: dict[str, Tensor] = {}
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        name = f"constant.{len(constants)}"
        value = getattr(module, str(node.target))
        with unset_fake_temporarily():
            constants[name] = value.detach().clone()
        first = next(iter(module.graph.nodes))
        with module.graph.inserting_before(first):
            new = module.graph.placeholder(f"constant_{len(constants)}")
        new.meta = dict(node.meta) | {"desc": _Constant(name), "val": node.meta.get("val", value)}
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    return constants


@dataclass(frozen=True, slots=True)
class _Constant:
    """Describes the placeholder of a lifted constant, as torch's descriptors do those of buffers."""

    target: str


def _symbols(inputs: Mapping[str, Tensor]) -> dict[Any, sympy.Expr]:
    """What the symbols of the inputs' first dims stand for."""
    symbols = {_symbol(tensor): BOUNDARIES - 1 for tensor in inputs.values()}
    return symbols | {_symbol(inputs["tokens"]): TOKENS, _symbol(inputs["cu_seqlens"]): BOUNDARIES}


def _symbol(tensor: Tensor) -> Any:
    size: Any = tensor.shape[0]
    return size.node.expr


def _describe(graph: fx.Graph, inputs: Mapping[str, Tensor]) -> fx.Graph:
    """Fills the `NodeInfo` of every node and renames placeholders by their meaning."""
    symbols = _symbols(inputs)
    placed = [node for node in graph.nodes if node.op == "placeholder"]
    for node in graph.nodes:
        facts = info(node)
        backward = node.meta.get("partitioner_tag") == "is_backward"
        facts.phase = "backward" if backward else "forward"
        values = node.meta.get("val")
        values = values if isinstance(values, list | tuple) else [values]
        facts.shapes = tuple(_shape(value, symbols) for value in values)
        facts.dtypes = tuple(value.dtype if isinstance(value, Tensor) else None for value in values)
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        if stack:
            facts.module, facts.module_class = next(reversed(stack.values()))
        facts.sequence = node.meta.get("seq_nr", -1)
        facts.source = _source(node.meta.get("stack_trace"))
    for node in placed:
        _describe_placeholder(node, tuple(inputs))
    return graph


def _describe_placeholder(node: fx.Node, fields: tuple[str, ...]) -> None:
    descriptor, facts = node.meta["desc"], info(node)
    kind = type(descriptor).__name__
    if kind in ("ParamAOTInput", "BufferAOTInput", "_Constant"):
        facts.role = "parameter" if kind == "ParamAOTInput" else "buffer"
        facts.name = descriptor.target.removeprefix("model.")
    elif kind == "PlainAOTInput":
        facts.role, facts.name = "input", fields[descriptor.idx]
    elif kind == "TangentAOTInput":
        facts.role, facts.name = "scale", "scale"
    else:
        raise CaptureError(f"capture: cannot interpret graph input {descriptor}")
    taken = {other.name for other in node.graph.nodes if other is not node}
    node.target = node.name = _identifier(facts.role, facts.name, taken)


def _identifier(role: str, name: str, taken: Set[str]) -> str:
    clean = "".join(char if char.isalnum() else "_" for char in name)
    base = clean if role in ("input", "scale") else f"{role}_{clean}"
    candidates = (base if number == 0 else f"{base}__{number}" for number in itertools.count())
    return next(candidate for candidate in candidates if candidate not in taken)


def _shape(value: Any, symbols: Mapping[Any, sympy.Expr]) -> Shape | None:
    if not isinstance(value, Tensor):
        return None
    result = []
    for size in value.shape:
        expression = size.node.expr.subs(symbols) if isinstance(size, torch.SymInt) else size
        result.append(int(expression) if isinstance(expression, int | sympy.Integer) else expression)
    return tuple(result)


def _source(stack_trace: str | None) -> str:
    """The innermost line of the trace that is the user's own, as file:line."""
    places = re.findall(r'File "([^"]+)", line (\d+)', stack_trace or "")
    own = [f"{file}:{line}" for file, line in places if is_users(file)]
    return own[-1] if own else ""


def _distinct_parameters(model: nn.Module) -> tuple[ParameterFacts, ...]:
    """Parameters by identity, so that a tie is what the module does and not what a configuration says."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    if not tensors:
        raise CaptureError(f"{type(model).__name__} has no parameters; there is nothing to train")
    return tuple(
        ParameterFacts(names[key][0], tuple(names[key]), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for key, tensor in tensors.items()
    )


def _captured(
    graph: fx.Graph,
    model: nn.Module,
    parameters: tuple[ParameterFacts, ...],
    buffers: dict[str, Tensor],
    extra: tuple[str, ...],
) -> Captured:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for descriptor in output.meta["desc"]:
        if (changed := getattr(descriptor, "mutated_input", None)) is not None:
            what = getattr(changed, "target", "an input").removeprefix("model.")
            raise CaptureError(
                f"the forward pass changes {what} in place; a step must leave buffers as they are, since micro-batches "
                "run in any order on any rank. Keep such state outside the model"
            )
    names: list[str | None] = ["loss"]
    for node, descriptor in zip(output.args[0][1:], output.meta["desc"][1:], strict=True):
        target = getattr(getattr(descriptor, "grad_of", None), "target", None)
        names.append(None if node is None or target is None else target.removeprefix("model."))
    if not any(names[1:]):
        name = type(model).__name__
        raise CaptureError(f"the loss depends on no trained parameter of {name}; nothing would be learnt")
    layers = _layer_list(model)
    return Captured(
        graph=graph,
        parameters=parameters,
        buffers=buffers,
        outputs=tuple(names),
        layers=layers,
        num_layers=len(model.get_submodule(layers)) if layers is not None else 0,  # type: ignore[arg-type]
        extra_fields=extra,
        module_names=tuple(name for name, _ in model.named_modules() if name),
    )


def _layer_list(model: nn.Module) -> str | None:
    """The module list (or sequence) that holds most parameters."""
    best, best_size = None, 0
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not path:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > best_size:
            best, best_size = path, size
    return best
