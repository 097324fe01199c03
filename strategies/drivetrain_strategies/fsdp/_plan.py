"""Plans the units of a sharded run, submodules whose parameters are gathered and freed together, and shards them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from drivetrain.errors import ConfigurationError, listed, nearest
from drivetrain_strategies._module_checks import refuse_absent_classes
from drivetrain_strategies._step_module import StepModule
from drivetrain_strategies.fsdp._device_mesh import Mesh
from drivetrain_strategies.fsdp._internals import forget_original
from drivetrain_strategies.fsdp._original_parameters import OriginalParameters

Wrap = None | Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool]
"""How units are chosen.

None chooses repeated blocks, a sequence of classes chooses the modules of these classes, and a function
``wrap(name, module)`` returns whether a module is a unit.
"""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(slots=True)
class Unit:
    """A submodule whose parameters are sharded and gathered together.

    Attributes:
        name: qualified name of the submodule. The root is called "" and owns the parameters that no other unit owns.
        module: the submodule.
        parameters: the parameters that the unit owns, without parameters of inner units. A tied parameter occurs once.
    """

    name: str
    module: nn.Module
    parameters: list[nn.Parameter] = field(default_factory=list)

    @property
    def size(self) -> str:
        numel = sum(parameter.numel() for parameter in self.parameters)
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)
        return f"{numel:,} parameters of {nbytes / 2**20:,.3f} MiB"


@dataclass(slots=True)
class Plan:
    """Assigns every parameter to a unit.

    Attributes:
        units: the units, innermost first, the root last.
        ties: parameters that several units share. The root unit owns them.
        replicated: the parameters that every rank holds whole, by name. These are ignored parameters and scalars.
        reason: how the units were chosen, as text for `table`.
    """

    units: list[Unit]
    ties: list[nn.Parameter]
    replicated: dict[str, nn.Parameter]
    reason: str

    @property
    def root(self) -> Unit:
        return self.units[-1]

    def table(self, shards: int) -> str:
        """Return the plan as text, with one line for all units of the same class and size."""
        numel = sum(parameter.numel() for unit in self.units for parameter in unit.parameters)
        lines = [f"FSDP shards {numel:,} parameters over {shards} ranks (units: {self.reason})"]
        groups: dict[tuple[str, str], list[Unit]] = {}
        for unit in self.units[:-1]:
            groups.setdefault((type(unit.module).__name__, unit.size), []).append(unit)
        for (kind, size), units in groups.items():
            lines.append(f"  {len(units)} x {kind} ({units[0].name} ... {units[-1].name}), each {size}")
        lines.append(f"  the rest: {self.root.size}")
        if self.replicated:
            lines.append(f"  on every rank: {listed(list(self.replicated))}")
        return "\n".join(lines)

    def shard(
        self,
        root: StepModule,
        mesh: Mesh,
        originals: OriginalParameters,
        reshard_after_forward: bool | None,
        **options: Any,
    ) -> FSDPModule:
        """Shard the units from the innermost outwards, then ``root``. Collective.

        Each unit's parameters are broadcast from rank 0 before the unit is sharded. Afterwards the full storage of the
        parameters is freed.

        Args:
            root: the module that runs the steps.
            mesh: the mesh to shard over.
            originals: the module's parameters, which shards replace.
            reshard_after_forward: passed to `fully_shard` for all units except the root. The root uses torch's default.
            **options: passed to `fully_shard` for all units.
        """
        options["mesh"] = mesh.data
        replicated = set(self.replicated.values())
        ignored = replicated | set(self.ties)
        if self.ties:
            # Tied parameters are registered on the root. `fully_shard` then finds all modules that share one.
            root.ties = nn.ParameterList(self.ties)
        for unit in self.units:
            mesh.broadcast(unit.parameters)
            if unit is self.root:
                fully_shard(root, ignored_params=replicated, **options)
            else:
                fully_shard(unit.module, ignored_params=ignored, reshard_after_forward=reshard_after_forward, **options)
            for parameter in unit.parameters:
                forget_original(parameter)
                originals.by_id[id(parameter)].free_storage()
        if mesh.data.device_type == "cpu":
            for child in root.modules():
                if isinstance(child, FSDPModule):
                    child.set_force_sum_reduction_for_comms(True)  # gloo does not support ReduceOp.PREMUL_SUM
        return cast(FSDPModule, root)

    def set_prefetch(self, forward: int, backward: int) -> None:
        """Set how many following units each unit prefetches, in module order. 0 keeps torch's default."""
        modules: list[FSDPModule] = [one for one in self.root.module.modules() if isinstance(one, FSDPModule)]
        for position, module in enumerate(modules):
            if following := modules[position + 1 : position + 1 + forward]:
                module.set_modules_to_forward_prefetch(following)
            if preceding := modules[max(position - backward, 0) : position]:
                module.set_modules_to_backward_prefetch(preceding[::-1])


def make_plan(module: nn.Module, wrap: Wrap, ignored: Sequence[str]) -> Plan:
    """Choose the units of ``module`` and assign the module's parameters to them.

    Args:
        module: the bare module.
        wrap: how to choose the units; see `Wrap`.
        ignored: names of parameters to replicate on every rank, with ``*`` as a wildcard.

    Raises:
        ConfigurationError: a class or a parameter name does not occur in ``module``, or a unit cannot be sharded.
    """
    replicated = _replicated_parameters(module, ignored)
    chosen, reason = _choose_units(module, wrap)
    units = {name: Unit(name, child) for name, child in chosen.items()}
    root = Unit("", module)
    ties = []
    whole = set(replicated.values())
    for parameter, owners in _owners(module, chosen).items():
        if parameter in whole:
            continue
        if len(owners) > 1:
            ties.append(parameter)
            root.parameters.append(parameter)
        else:
            units.get(owners.pop(), root).parameters.append(parameter)
    # Inner units come before outer units. A unit that owns no parameters is dropped, since it has nothing to shard.
    inner_units = sorted((unit for unit in units.values() if unit.parameters), key=lambda unit: -unit.name.count("."))
    for unit in (*inner_units, root):
        _refuse_mixed_dtypes(unit)
    return Plan([*inner_units, root], ties, replicated, reason)


# Choosing the units of a module


def _choose_units(module: nn.Module, wrap: Wrap) -> tuple[dict[str, nn.Module], str]:
    named = {name: child for name, child in module.named_modules() if name}
    if wrap is None:
        return _repeated_blocks(module)
    if callable(wrap):
        chosen = {name: child for name, child in named.items() if wrap(name, child)}
        return chosen, "chosen by wrap"
    classes: tuple[type[nn.Module], ...] = tuple(wrap)
    refuse_absent_classes(module, classes, "wrap")
    return {name: child for name, child in named.items() if isinstance(child, classes)}, "classes in wrap"


def _repeated_blocks(module: nn.Module) -> tuple[dict[str, nn.Module], str]:
    """Return the outermost modules that have a sibling of the same class in a container, as most networks' layers do.

    A block is a module with submodules. If no block repeats, repeated layers that own a matrix are returned. Modules in
    a container whose name contains ``experts`` belong to the enclosing block, because ranks may run different experts,
    and all ranks must gather the same units.
    """
    for is_block, reason in ((_is_block, "repeated blocks"), (_is_layer, "repeated layers")):
        units: dict[str, nn.Module] = {}
        for name, container in module.named_modules():
            if not isinstance(container, CONTAINERS) or any(_inside(name, unit) for unit in units):
                continue
            if "experts" in name.rpartition(".")[2]:
                continue
            children = {f"{name}.{key}" if name else key: child for key, child in container.named_children()}
            kinds = Counter(type(child) for child in children.values() if is_block(child))
            units |= {path: child for path, child in children.items() if kinds[type(child)] > 1}
        if units:
            return units, reason
    return {}, "no repeated blocks, so all parameters are gathered as one unit; choose units with wrap"


def _is_block(module: nn.Module) -> bool:
    has_submodules = next(module.children(), None) is not None
    return has_submodules and not isinstance(module, CONTAINERS) and next(module.parameters(), None) is not None


def _is_layer(module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    return next(module.children(), None) is None and any(parameter.dim() > 1 for parameter in parameters)


def _inside(name: str, unit: str) -> bool:
    return name == unit or name.startswith(unit + ".")


# Assigning parameters to units


def _owners(module: nn.Module, units: dict[str, nn.Module]) -> dict[nn.Parameter, set[str]]:
    """Return for each parameter the innermost units around the modules that register it. The root is called ""."""
    unit_names = {id(child): name for name, child in units.items()}
    units_around = {"": ""}
    owners: dict[nn.Parameter, set[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        unit = units_around[name] = unit_names.get(id(child), units_around[name.rpartition(".")[0]])
        for parameter in child._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(unit)
    return owners


def _replicated_parameters(module: nn.Module, ignored: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters to replicate, by name: ignored ones, and those that `fully_shard` cannot shard.

    It cannot shard scalars, parameters without elements, and parameters that are not contiguous (channels last).
    """
    parameters = dict(module.named_parameters())
    replicated = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.dim() == 0
        or (not isinstance(parameter, DTensor) and (parameter.numel() == 0 or not parameter.is_contiguous()))
    }
    for pattern in ignored:
        matches = {name: value for name, value in parameters.items() if fnmatchcase(name, pattern)}
        if not matches:
            raise ConfigurationError(
                f"ignored={pattern!r} matches no parameter of {type(module).__name__}.{nearest(pattern, parameters)}",
                "ignored is a list of parameter names, with '*' as a wildcard.",
                f"use names such as {', '.join(list(parameters)[:10])}.",
            )
        replicated |= matches
    return replicated


def _refuse_mixed_dtypes(unit: Unit) -> None:
    dtypes = {str(parameter.dtype) for parameter in unit.parameters if parameter.requires_grad}
    if len(dtypes) > 1:
        raise ConfigurationError(
            f"Unit {unit.name or 'root'!r} has trainable parameters of several dtypes: {', '.join(sorted(dtypes))}.",
            "the gradients of a unit are reduced together, in one dtype.",
            "convert them to one dtype, freeze some of them, or choose units with wrap.",
        )
