"""The front door: `import hgraph as hg`, then `hg.compile`, `hg.load_pool` and so on.

Names are looked up in the table below on first use (SPEC 1, lazy loading), so `import hgraph` is quick, and the names
of the packages above this one are here without an import upwards. Our own modules import from where a name is defined.
"""

from importlib import import_module

_MODULE_OF = {
    "AdamW": "runtime.optimizer",
    "Annotation": "hgraph.annotation",
    "MemoryLimits": "runtime.calibrate",
    "ModelFacts": "hgraph.model_facts",
    "Partial": "hgraph.placements",
    "Pool": "hgraph.strategy",
    "Program": "runtime.program",
    "Replica": "hgraph.strategy",
    "Replicate": "hgraph.placements",
    "Scheme": "hgraph.strategy",
    "Shard": "hgraph.placements",
    "Stage": "hgraph.strategy",
    "Strategy": "hgraph.strategy",
    "Subgroup": "hgraph.annotation",
    "TensorReshard": "hgraph.bundles",
    "Topology": "hgraph.topology",
    "compile": "runtime.program",
    "load_pool": "hgraph.strategy_file",
    "load_topology": "hgraph.topology_file",
    "parse_pool": "hgraph.strategy_file",
    "plan_bridge": "hgraph.bridge_plan",
    "plan_reshard": "hgraph.reshard",
    "topology_from_environment": "hgraph.topology_file",
    "verify": "runtime.verify",
    "write_pool": "hgraph.strategy_file",
}
_SUBPACKAGES = ("data",)

__all__ = [*_MODULE_OF, *_SUBPACKAGES]


def __getattr__(name: str) -> object:
    """Returns the public name `name`, importing the module that defines it on first use."""
    if name in _SUBPACKAGES:
        return import_module(f"hgraph.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hgraph' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    import_module("hgraph.installation").check_installation()
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted({*globals(), *__all__})
