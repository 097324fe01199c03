"""All uses of private names of `torch.distributed.fsdp.fully_shard`.

The code uses the states and parameter groups behind an `FSDPModule` to find parameters without a gradient, to zero
gradients, to run a backward within a forward, and to undo the sharding. Where names differ between the supported
versions of torch (2.11 and later), the code checks which name exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress
from operator import attrgetter, ne
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from drivetrain.strategies import add_gradient_hook, copy_attributes_and_hooks
from drivetrain_strategies._module_checks import refuse_accumulate_hook
from drivetrain_strategies.fsdp._weight_casts import WeightCasts

OVERRIDDEN_METHODS = (
    (FSDPParamGroup, "post_backward"),
    (FSDPParamGroup, "post_forward"),
    (FSDPParamGroup, "_to_sharded"),
    (FSDPParamGroup, "_to_unsharded"),
    (FSDPParam, "init_unsharded_param"),
    (FSDPParam, "reset_sharded_param"),
)
"""The methods of torch that this module overrides. If torch did not call one of them, numbers would be wrong."""

FULL_TENSOR = DTensor.full_tensor
"""torch's method, which `ChangedDTensor` replaces within a run."""

_get_requires_grad = attrgetter("requires_grad")  # read for many parameters at once, without a Python call each
_get_version = attrgetter("_version")


class _Whole(torch.autograd.Function):
    """Gathers a DTensor. Averages its gradient over the ranks, as all gradients are."""

    @staticmethod
    def forward(context: Any, value: DTensor) -> torch.Tensor:
        context.mesh = value.device_mesh
        return FULL_TENSOR(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> DTensor:
        mesh: DeviceMesh = context.mesh
        average = gradient / mesh.size()
        for dimension in range(mesh.ndim):
            dist.all_reduce(average, group=mesh.get_group(dimension))
        return DTensor.from_local(average, mesh, [Replicate()] * mesh.ndim, run_check=False)


class _WatchedGroup(FSDPParamGroup):
    """A parameter group whose `Sharded` object fills missing gradients with zeros before the exchange.

    If a rank lacked a gradient that other ranks exchange, the collective would hang or add up gradients of different
    parameters. torch itself fills missing gradients only since version 2.13.
    """

    watcher: Sharded

    def post_backward(self, *unused: Any) -> None:
        if self.reduce_grads:
            self.watcher._fill_missing_gradients(self.fsdp_params)
        super().post_backward(*unused)


class _CastingGroup(_WatchedGroup):
    """A parameter group that frees and restores autocast's casts of the weights together with the weights."""

    casts: WeightCasts

    def post_forward(self, *arguments: Any) -> Any:
        if self.post_forward_mesh_info is not None:  # if None, weights and casts are kept until backward
            self.casts.find()
        return super().post_forward(*arguments)

    def _to_unsharded(self) -> None:
        super()._to_unsharded()  # type: ignore[no-untyped-call]
        self.casts.restore()

    def _to_sharded(self) -> None:
        super()._to_sharded()  # type: ignore[no-untyped-call]
        self.casts.drop()


class _WatchedParam(FSDPParam):
    """A parameter that notifies its `Sharded` object when the gathered tensor is first created."""

    watcher: Sharded
    plain_name: str
    """The parameter's name in the user's module."""
    position: int
    """The parameter's number in `Sharded.parameters`."""
    version_at_gather: int
    """The version of the gathered tensor when it was created."""

    def tensors(self) -> list[nn.Parameter]:
        """Return the shard and, once it was gathered, the gathered tensor, since the module may use either."""
        return [self.sharded_param, *([self._unsharded_param] if hasattr(self, "_unsharded_param") else [])]

    def init_unsharded_param(self) -> None:
        first = not hasattr(self, "_unsharded_param")
        super().init_unsharded_param()  # type: ignore[no-untyped-call]
        if first:
            self.version_at_gather = self._unsharded_param._version
            self.watcher._on_first_gather(self)

    def reset_sharded_param(self) -> None:
        super().reset_sharded_param()  # type: ignore[no-untyped-call]
        self.watcher._gathered = None

    def to_accumulated_grad_if_needed(self) -> None:
        if hasattr(self, "_unsharded_param"):  # torch fails on a parameter that was never gathered
            super().to_accumulated_grad_if_needed()


class _Gathered(NamedTuple):
    """The parameters that were gathered at least once, with their shards and with the tensors that replace these."""

    parameters: list[_WatchedParam]
    shards: list[nn.Parameter]
    tensors: list[nn.Parameter]
    versions: tuple[int, ...]
    """The versions of the tensors when they were gathered."""
    shard_by_id: dict[int, nn.Parameter]
    """Each shard by the ``id`` of the tensor that replaces it."""


class Sharded:
    """A module sharded by `fully_shard`.

    Args:
        root: the outermost sharded module.
    """

    def __init__(self, root: FSDPModule) -> None:
        self.root = root
        self._root_state: Any = root._get_fsdp_state()
        module = cast(nn.Module, root)
        units = [child for child in module.modules() if isinstance(child, FSDPModule)]
        self._groups: list[Any] = [group for unit in units for group in _groups_of(unit._get_fsdp_state())]
        self.parameters: list[_WatchedParam] = []
        """All sharded parameters, in the same order on every rank."""
        self._filled_with_zeros: dict[int, _WatchedParam] = {}
        self._had_gradient: set[int] = set()
        self._direct_gradients_allowed = False
        self._zero_hooks: list[Any] | None = None
        self._gathered: _Gathered | None = None
        names = {id(parameter): name.removeprefix("module.") for name, parameter in module.named_parameters()}
        for group in self._groups:
            group.__class__ = _WatchedGroup
            group.watcher = self
            for parameter in group.fsdp_params:
                parameter.__class__ = _WatchedParam
                parameter.watcher = self
                parameter.plain_name = names[id(parameter.sharded_param)]  # without the prefix of `StepModule`
                parameter.position = len(self.parameters)
                self.parameters.append(parameter)

    def free_casts(self, device_type: str, dtype: torch.dtype) -> None:
        """Free autocast's casts of weights, in ``dtype``, together with the gathered weights; see `WeightCasts`."""
        for group in self._groups:
            group.__class__ = _CastingGroup
            group.casts = WeightCasts(group.fsdp_params, device_type, dtype)

    @torch.no_grad()
    def give_storage(self, device: torch.device) -> None:
        """Replace meta shards by shards of zeros. All modules then hold new parameter objects."""
        for parameter in self.parameters:
            shard: Any = parameter.sharded_param
            if not shard.to_local().is_meta:
                continue
            local = torch.zeros_like(shard.to_local(), device="cpu" if parameter.offload_to_cpu else device)
            materialized = DTensor.from_local(
                local, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
            )
            parameter._setattr_on_modules(nn.Parameter(materialized, requires_grad=shard.requires_grad))
            parameter.reset_sharded_param()

    # During a step: exchange of gradients and resharding

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next backward exchanges gradients or only accumulates them."""
        for group in self._groups:
            group.reduce_grads = group.all_reduce_grads = enabled

    def set_reshard_after_backward(self, enabled: bool) -> None:
        """Set whether the next backward drops each unit's gathered parameters after using them."""
        for group in self._groups:
            group.reshard_after_backward = enabled

    def reshard(self) -> None:
        """Drop all gathered parameters, so that the module holds its shards."""
        for group in self._groups:
            if not group.is_sharded:
                group._to_sharded()

    def begin_backward_within_forward(self, loss: torch.Tensor) -> None:
        """Prepare for a backward that begins before the root's forward has ended, as in manual optimization."""
        self._root_state._register_pre_backward_hook(loss)

    def prepare_root(self) -> None:
        """Let the root unit prepare its inner units, which must happen before any of them is called."""
        self._root_state._lazy_init()

    def gather_root(self) -> None:
        """Gather the parameters that the root unit owns again, with their current values."""
        self.root.reshard()
        self.root.unshard()

    # Missing and zeroed gradients, and changes of ``requires_grad``

    def _fill_missing_gradients(self, parameters: Sequence[Any]) -> None:
        """Record which parameters have a gradient before the exchange, and fill missing ones with zeros."""
        for fsdp_param in parameters:
            if not hasattr(fsdp_param, "_unsharded_param"):
                continue
            gathered = fsdp_param.unsharded_param
            # If a module runs twice in a forward, torch calls this method twice in the backward, the second time with a
            # gradient.
            if fsdp_param.unsharded_accumulated_grad is not None or gathered.grad is not None:
                self._had_gradient.add(id(fsdp_param))
            elif gathered.requires_grad:
                if fsdp_param.sharded_param.grad is not None:  # of an earlier backward, to which zeros are added
                    self._had_gradient.add(id(fsdp_param))
                self._filled_with_zeros[id(fsdp_param)] = fsdp_param
                gathered.grad = torch.zeros_like(gathered, dtype=gathered.grad_dtype)

    def allow_direct_gradients(self) -> None:
        """From now on, accept gradients that flow to a shard itself rather than to the gathered tensor."""
        if not self._direct_gradients_allowed:
            self._direct_gradients_allowed = True
            for parameter in self.parameters:
                add_gradient_hook(parameter.sharded_param, partial(self._on_direct_gradient, parameter))

    def whole(self, value: DTensor) -> torch.Tensor:
        """Return the whole tensor, whose gradient is averaged over the ranks and flows to ``value``. Collective."""
        self.allow_direct_gradients()
        return cast(torch.Tensor, _Whole.apply(value))  # type: ignore[no-untyped-call]

    def meshes(self) -> set[DeviceMesh]:
        """Return the meshes over which the parameters are sharded."""
        return {cast(Any, parameter.sharded_param).device_mesh for parameter in self.parameters}

    def _on_direct_gradient(self, parameter: _WatchedParam, gradient: torch.Tensor) -> torch.Tensor:
        self._had_gradient.add(id(parameter))
        # The exchange adds to the gradient's local part, so the gradient has to be sharded as its parameter is.
        shard: Any = parameter.sharded_param
        return gradient.redistribute(placements=shard.placements) if isinstance(gradient, DTensor) else gradient

    def take_unused(self) -> list[_WatchedParam]:
        """Return the parameters without a gradient in the last synchronized backward, and clear these records."""
        unused = [fsdp_param for key, fsdp_param in self._filled_with_zeros.items() if key not in self._had_gradient]
        self._filled_with_zeros.clear()
        self._had_gradient.clear()
        return unused

    @contextmanager
    def zeroed_gradients(self) -> Iterator[None]:
        """Make a backward add exactly zero to the gradients of sharded parameters within this context."""
        self._zero_hooks = []
        for parameter in self._gathered_once().parameters:
            self._add_zero_hook(parameter)
        try:
            yield
        finally:
            for handle in self._zero_hooks:
                handle.remove()
            self._zero_hooks = None

    def _on_first_gather(self, parameter: _WatchedParam) -> None:
        self._gathered = None
        # Steps use the gathered tensor: what user code has set on the shard, as on any parameter, has to be there too.
        copy_attributes_and_hooks(parameter.sharded_param, parameter._unsharded_param)
        refuse_accumulate_hook(parameter.plain_name, parameter.sharded_param)
        if self._zero_hooks is not None:
            self._add_zero_hook(parameter)

    def _add_zero_hook(self, parameter: _WatchedParam) -> None:
        gathered = parameter._unsharded_param
        if parameter.sharded_param.requires_grad:
            gathered.requires_grad_(True)  # torch copies ``requires_grad`` from the shard only at the next gathering
            assert self._zero_hooks is not None
            self._zero_hooks.append(gathered.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]

    def trainable_changed(self) -> None:
        """Recompute the dtypes in which gradients are reduced. torch derived them from the trainable parameters.

        Raises:
            AssertionError: from torch, if the trainable parameters of a group have several dtypes.
        """
        for group in self._groups:
            if hasattr(group, "_reduce_dtype"):  # without the attribute, torch computes the dtypes in the first forward
                group._init_mp_dtypes()
        for parameter in self.parameters:
            for tensor in parameter.tensors():
                tensor.requires_grad_(parameter.sharded_param.requires_grad)

    def toggled_while_gathered(self) -> list[str]:
        """Return parameters frozen or unfrozen only on the gathered tensor. torch would silently undo this change."""
        gathered = self._gathered_once()
        in_shards = tuple(map(_get_requires_grad, gathered.shards))
        in_tensors = tuple(map(_get_requires_grad, gathered.tensors))
        return [] if in_shards == in_tensors else self._names_where(map(ne, in_shards, in_tensors))

    def updated_while_gathered(self) -> list[str]:
        """Return parameters whose gathered tensor was modified. Resharding would drop the modification."""
        gathered = self._gathered_once()
        versions = tuple(map(_get_version, gathered.tensors))
        return [] if versions == gathered.versions else self._names_where(map(ne, versions, gathered.versions))

    def _names_where(self, differs: Iterable[bool]) -> list[str]:
        return [fsdp_param.plain_name for fsdp_param in compress(self._gathered_once().parameters, differs)]

    def shards_by_gathered_id(self) -> dict[int, nn.Parameter]:
        """Return each shard by the id of the gathered tensor that replaces the shard in the modules."""
        return self._gathered_once().shard_by_id

    def _gathered_once(self) -> _Gathered:
        if self._gathered is None:
            parameters = [fsdp_param for fsdp_param in self.parameters if hasattr(fsdp_param, "_unsharded_param")]
            shards = [fsdp_param.sharded_param for fsdp_param in parameters]
            tensors = [fsdp_param._unsharded_param for fsdp_param in parameters]
            versions = tuple(fsdp_param.version_at_gather for fsdp_param in parameters)
            by_id = dict(zip(map(id, tensors), shards, strict=True))
            self._gathered = _Gathered(parameters, shards, tensors, versions, by_id)
        return self._gathered

    def forget_gradients(self) -> None:
        """Drop gradients that were accumulated but not exchanged."""
        for parameter in self.parameters:
            _set_existing(parameter, unsharded_accumulated_grad=None)  # torch 2.15 accumulates in the gradient itself
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def undo_sharding(root: nn.Module) -> None:
    """Undo `fully_shard` on all modules, which keep their shards as parameters. Does not communicate."""
    for module in list(root.modules()):
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(name, None)
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in _groups_of(state):
            group._to_sharded()
            for attribute in ("watcher", "casts"):
                group.__dict__.pop(attribute, None)
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()
            for parameter in group.fsdp_params:
                parameter._post_load_hook_handle.remove()
                parameter.__dict__.pop("watcher", None)
                parameter.mesh_info = parameter.post_forward_mesh_info = None
            # Groups, parameters and mesh infos reference the process group and each other. Peers that are blocked in
            # the process group fail only once it is released.
            group.fsdp_params = []
            group.mesh_info = group.post_forward_mesh_info = None
        _set_existing(state, _fsdp_param_groups=[], _fsdp_param_group=None)
        state._comm_ctx.post_forward_order = []
        state._comm_ctx.all_gather_state = None
        _set_existing(state._comm_ctx, reduce_scatter_states=[], reduce_scatter_state=None)
        state._state_ctx.all_states = []
        plain: Any = module
        for key in (STATE_KEY, REGISTRY_KEY):
            plain.__dict__.pop(key, None)
        _module_state_mapping.pop(plain, None)
        plain.__class__ = type(plain).__mro__[module._orig_cls_mro_index]


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of one module. torch 2.11 stores one group or None; later versions store a list."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _set_existing(owner: Any, **values: Any) -> None:
    """Set the given attributes if they exist in this version of torch."""
    for name, value in values.items():
        if name in owner.__dict__:
            setattr(owner, name, value)


def forget_original(parameter: nn.Parameter) -> None:
    """Remove the attribute that `fully_shard` sets on an original parameter."""
    parameter.__dict__.pop("_fsdp_orig_uid", None)


def remove_tensor_parallel_hooks(module: nn.Module) -> None:
    """Remove the hooks of `parallelize_module`, which need the run's mesh.

    Also remove the mark with which `parallelize_module` forbids a second call.
    """
    for child in module.modules():
        child.__dict__.pop("_distribute_module_applied", None)
        for hooks in (child._forward_pre_hooks, child._forward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed.tensor"):
                    del hooks[key]


def forget_meshes(device: torch.device | None = None) -> None:
    """Empty DTensor's caches of sharding propagation.

    Meshes of equal sizes and names compare equal, so a later run would get cached results that refer to the mesh of an
    earlier run, whose process groups no longer exist ("Could not resolve the process group registered under the name
    ...").

    Args:
        device: the device on which backward ran DTensor operations. The caches are per thread, and backward runs in one
            of autograd's threads, except on the CPU.
    """
    _empty_caches()
    if device is not None and device.type != "cpu":
        with suppress(RuntimeError), torch.enable_grad():  # after a device error, no kernel can run
            start = torch.zeros((), device=device, requires_grad=True)
            _EmptyCachesInBackward.apply(start).backward()  # type: ignore[no-untyped-call]


class _EmptyCachesInBackward(torch.autograd.Function):
    """A function whose backward empties the caches of the thread that runs the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _empty_caches()
        return gradient


def _empty_caches() -> None:
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()


def release_process_groups(mesh: DeviceMesh) -> None:
    """Drop the process groups that a mesh references.

    A DTensor that outlives the run, in a traceback for example, keeps the mesh alive. Peers that are blocked
    in a group wait for this rank until this rank releases the group.
    """
    for owner in (mesh, mesh._get_root_mesh()):
        owner._pg_registry.clear()


def local_region(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of this rank's part of ``tensor``, which may be split twice along one dimension."""
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)
