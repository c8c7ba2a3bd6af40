"""What a scheme compiled to, on one page of text: stages, communication, memory, parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import sympy
from torch import fx

from hgraph.annotation import ranks_text
from hgraph.capture import Captured
from passes.insert_comm import is_reshard
from passes.pipelines import CompiledScheme
from passes.split_stages import Transfer
from runtime.dumps.communication import LOCAL, reshard_text, words_of_reshard
from runtime.memory import MIB, StageMemory, scheme_memory

__all__ = ["group_text", "plain_table", "scheme_summary"]


def scheme_summary(compiled: CompiledScheme, captured: Captured, num_ranks: int) -> str:
    """Returns the page of a scheme in a job of `num_ranks`."""
    scheme = compiled.scheme
    memory = scheme_memory(compiled, captured, num_ranks)
    head = (
        f"scheme {scheme}: {_count(scheme.num_ranks, 'rank')}, {_count(scheme.pp, 'stage')}, "
        f"schedule {scheme.schedule}, {compiled.num_programs} programs\n"
        "ranks are counted from 0 within the replica; T is the number of tokens of a micro-batch, S1 its number of "
        "sequences plus 1"
    )
    parts = [
        head,
        _stage_table(compiled, captured.num_layers),
        _memory_table(memory),
        "between stages\n" + _transfer_table(compiled.transfers) if compiled.transfers else "",
        "parameters\n" + _parameter_table(compiled, captured),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def group_text(ranks: Sequence[int]) -> str:
    """Returns ranks as annotations write them: `0-3,6`."""
    return ranks_text(ranks)


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in plain text, columns two spaces apart, without trailing spaces."""
    widths = [max(len(row[index]) for row in [headers, *rows]) for index in range(len(headers))]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _stage_table(compiled: CompiledScheme, num_layers: int) -> str:
    split = compiled.scheme.layer_split(num_layers)
    rows = [
        [
            str(stage.graphs.stage),
            group_text(compiled.scheme.stage_ranks(stage.graphs.stage)),
            str(split[stage.graphs.stage]),
            str(stage.num_programs),
            _communication(stage.graphs.forward),
            _communication(stage.graphs.backward),
        ]
        for stage in compiled.stages
    ]
    return plain_table(["stage", "ranks", "layers", "programs", "forward communicates", "backward communicates"], rows)


def _communication(graph: fx.Graph) -> str:
    words = Counter(reshard_text(node)[0] for node in graph.nodes if is_reshard(node))
    words.pop(LOCAL, None)
    return " + ".join(f"{count} x {word}" for word, count in sorted(words.items())) or "nothing"


def _memory_table(memory: Sequence[StageMemory]) -> str:
    rows = [
        [
            str(stage),
            f"{own.fixed_bytes / MIB:.2f} MiB",
            str(sympy.expand(own.per_micro_batch)),
            "all" if own.in_flight is None else str(own.in_flight),
            str(sympy.expand(own.temporary)),
        ]
        for stage, own in enumerate(memory)
    ]
    headers = ["stage", "weights, gradients, optimizer", "bytes kept per micro-batch", "in flight", "temporary bytes"]
    return "memory of the fullest rank\n" + plain_table(headers, rows)


def _transfer_table(transfers: Sequence[Transfer]) -> str:
    rows = [
        [
            one.phase,
            f"{one.sender} -> {one.receiver}",
            one.name,
            f"{str(one.dtype).removeprefix('torch.')}[{', '.join(map(str, one.shape))}]",
            f"{one.source} -> {one.target}",
            words_of_reshard(one.source, one.target, one.shape),
        ]
        for one in sorted(transfers, key=lambda one: (one.phase == "backward", one.sender, one.name))
    ]
    return plain_table(["phase", "stages", "value", "shape", "from -> to", "by"], rows)


def _parameter_table(compiled: CompiledScheme, captured: Captured) -> str:
    shapes = {name: facts.shape for facts in captured.parameters for name in facts.names}
    rows = [
        [
            name,
            str(stage),
            f"[{', '.join(map(str, shapes[name]))}]",
            str(annotation),
            str(compiled.gradients.get((name, stage), "-")),
        ]
        for (name, stage), annotation in sorted(compiled.parameters.items(), key=lambda item: item[0][1])
    ]
    return plain_table(["name", "stage", "shape", "weights", "gradients"], rows)
