"""Everything of `torch.distributed.fsdp.fully_shard` that torch keeps to itself, in one place.

What is used of it: the states and parameter groups behind an `FSDPModule`, so that parameters without a gradient are
known, gradients can be silenced, a backward may run inside a forward, and all of it can be undone. Where a name differs
between the versions of torch that this runs on, from 2.11 on, what is there is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from drivetrain_strategies.fsdp._weight_casts import WeightCasts

NEEDED = (
    (FSDPModule, "_get_fsdp_state"),
    (FSDPParamGroup, "post_backward"),
    (FSDPParamGroup, "post_forward"),
    (FSDPParamGroup, "_to_sharded"),
    (FSDPParamGroup, "_to_sharded_post_forward"),
    (FSDPParamGroup, "_to_unsharded"),
    (FSDPParamGroup, "_init_mp_dtypes"),
    (FSDPParam, "_setattr_on_modules"),
    (FSDPParam, "init_unsharded_param"),
    (FSDPParam, "reset_sharded_param"),
    (DeviceMesh, "_get_root_mesh"),
)
"""Methods without which nothing here works."""

CastsOf = Callable[[Sequence[nn.Module], Sequence[Any]], WeightCasts | None]
"""From the modules of a unit and torch's `FSDPParam` of its weights to what keeps track of their casts."""

_TRAINS = attrgetter("requires_grad")  # read for many parameters at once, without a Python call each
_VERSION = attrgetter("_version")


class _WatchedGroup(FSDPParamGroup):
    """Gives parameters that got no gradient zeros to exchange, and tells its watcher of them.

    A rank that had nothing to exchange where others have would hang, or add up another parameter's gradient. torch 2.13
    can do so by itself, earlier versions cannot.
    """

    watcher: Sharded

    def post_backward(self, *unused: Any) -> None:
        if self.reduce_grads:
            self.watcher._look_at_gradients(self.fsdp_params)
        super().post_backward(*unused)


class _CastingGroup(_WatchedGroup):
    """Whose weights are cast by autocast: the casts come and go with the weights."""

    casts: WeightCasts

    def post_forward(self, *arguments: Any) -> Any:
        if self.post_forward_mesh_info is not None:  # else the weights stay, and the casts may
            self.casts.find()
        return super().post_forward(*arguments)

    def _to_unsharded(self) -> None:
        super()._to_unsharded()  # type: ignore[no-untyped-call]
        self.casts.restore()

    def _to_sharded(self) -> None:
        super()._to_sharded()  # type: ignore[no-untyped-call]
        self.casts.drop()

    def _to_sharded_post_forward(self) -> None:
        super()._to_sharded_post_forward()  # type: ignore[no-untyped-call]
        self.casts.drop()


class _WatchedParam(FSDPParam):
    """Tells its watcher when its whole tensor is first made."""

    watcher: Sharded

    def init_unsharded_param(self) -> None:
        fresh = not hasattr(self, "_unsharded_param")
        super().init_unsharded_param()  # type: ignore[no-untyped-call]
        if fresh:
            self.watcher._made(self)


class Sharded:
    """What `fully_shard` made of a module and the modules in it.

    Args:
        root: the module that was sharded last, around all others.
        casts_of: makes what keeps track of the casts that autocast makes of a unit's weights; None where it makes none.
    """

    def __init__(self, root: FSDPModule, casts_of: CastsOf | None = None) -> None:
        self.root = root
        self._module: nn.Module = root  # type: ignore[assignment]
        self.modules: list[Any] = [child for child in self._module.modules() if isinstance(child, FSDPModule)]
        self._root_state: Any = root._get_fsdp_state()
        self._groups: list[Any] = [group for module in self.modules for group in _groups_of(module._get_fsdp_state())]
        self.parameters: list[_WatchedParam] = []
        """In an order that is the same on every rank."""
        self._asked_for_zeros: dict[int, _WatchedParam] = {}
        self._gave_gradient: set[int] = set()
        self._silencers: list[Any] | None = None
        self._shards: list[Any] = []
        self._wholes: list[Any] = []
        self._version_made: dict[int, int] = {}
        self._frozen: list[_WatchedParam] = []
        self._frozen_wholes: list[Any] = []
        self._frozen_versions: tuple[int, ...] = ()
        for group in self._groups:
            casts = None if casts_of is None else casts_of(group.modules, group.fsdp_params)
            group.__class__ = _WatchedGroup if casts is None else _CastingGroup
            group.watcher = self
            if casts is not None:
                group.casts = casts
            for parameter in group.fsdp_params:
                parameter.__class__ = _WatchedParam
                parameter.watcher = self
                self.parameters.append(parameter)

    @torch.no_grad()
    def give_storage(self, device: torch.device) -> None:
        """Give shards that have no storage some, of zeros; they become other objects in all their places."""
        for parameter in self.parameters:
            shard: Any = parameter.sharded_param
            if not shard.to_local().is_meta:
                continue
            local = torch.zeros_like(shard.to_local(), device="cpu" if parameter.offload_to_cpu else device)
            real = DTensor.from_local(
                local, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
            )
            parameter._setattr_on_modules(nn.Parameter(real, requires_grad=shard.requires_grad))
            parameter.reset_sharded_param()  # type: ignore[no-untyped-call]

    def meshes(self) -> list[Any]:
        """Further meshes that torch made, for parameters kept in larger parts between forward and backward."""
        found = {
            id(info.mesh): info.mesh
            for group in self._groups
            if (info := group.post_forward_mesh_info) is not None and info is not group.mesh_info
        }
        return list(found.values())

    # In a step

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward exchanges gradients, or only adds them up."""
        for group in self._groups:
            group.reduce_grads = group.all_reduce_grads = enabled

    def set_reshard_after_backward(self, enabled: bool) -> None:
        """Whether the next backward drops the whole parameters when it is through with them."""
        for group in self._groups:
            group.reshard_after_backward = enabled

    def reshard(self) -> None:
        """Drop all whole parameters, so that the module holds its shards."""
        for group in self._groups:
            if not group.is_sharded:
                group._to_sharded()

    def begin_backward_within_forward(self, loss: torch.Tensor) -> None:
        """Announce a backward that begins before the root's forward has ended, as manual optimization's do."""
        self._root_state._register_pre_backward_hook(loss)

    def gather_root(self) -> None:
        """Have the root's own parameters whole, with their present values."""
        self.root.reshard()
        self.root.unshard()

    # Gradients that are not there

    def _look_at_gradients(self, parameters: Sequence[Any]) -> None:
        """Note who has a gradient before it is exchanged, and give zeros to those that trained and have none."""
        for one in parameters:
            if not hasattr(one, "_unsharded_param"):
                continue
            whole = one.unsharded_param
            # A module that runs twice in a forward comes here twice in a backward, with its gradient the second time.
            if one.unsharded_accumulated_grad is not None or whole.grad is not None:
                self._gave_gradient.add(id(one))
            elif whole.requires_grad:
                self._asked_for_zeros[id(one)] = one
                whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)

    def take_unused(self) -> list[_WatchedParam]:
        """Those that had no gradient in the last backward that exchanged them; asked once."""
        found = [one for key, one in self._asked_for_zeros.items() if key not in self._gave_gradient]
        self._asked_for_zeros.clear()
        self._gave_gradient.clear()
        return found

    @contextmanager
    def without_gradient(self) -> Iterator[None]:
        """Within it a backward adds exactly zero to the gradients of sharded parameters."""
        self._silencers = []
        for parameter in self.parameters:
            if hasattr(parameter, "_unsharded_param"):
                self._silence(parameter)
        try:
            yield
        finally:
            for handle in self._silencers:
                handle.remove()
            self._silencers = None

    def _made(self, parameter: _WatchedParam) -> None:
        self._version_made[id(parameter)] = parameter._unsharded_param._version
        self._list_made()
        if self._silencers is not None:
            self._silence(parameter)

    def _silence(self, parameter: _WatchedParam) -> None:
        whole = parameter._unsharded_param
        if parameter.sharded_param.requires_grad:
            whole.requires_grad_(True)  # torch brings it up to date only when it is gathered next
            assert self._silencers is not None
            self._silencers.append(whole.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]

    def set_requires_grad(self, parameter: _WatchedParam, requires_grad: bool) -> None:
        """Set it on the shard, and on the whole tensor, which may be the one in use."""
        parameter.sharded_param.requires_grad_(requires_grad)
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.requires_grad_(requires_grad)

    def trainable_changed(self) -> None:
        """Bring up to date what torch derived from what trained before: the dtypes in which a group is reduced.

        Raises:
            AssertionError: torch's, where what trains in a group now is of several dtypes.
        """
        for group in self._groups:
            if hasattr(group, "_reduce_dtype"):  # else it has not run yet, and will look for itself
                group._init_mp_dtypes()
        for parameter in self.parameters:
            self.set_requires_grad(parameter, parameter.sharded_param.requires_grad)
        self._list_made()

    def changed_while_whole(self) -> list[_WatchedParam]:
        """Those whose whole tensor was frozen or unfrozen, where the shard was not: torch would undo it unseen."""
        if tuple(map(_TRAINS, self._shards)) == tuple(map(_TRAINS, self._wholes)):
            return []
        return [
            one
            for one in self.parameters
            if hasattr(one, "_unsharded_param")
            and one._unsharded_param.requires_grad != one.sharded_param.requires_grad
        ]

    def moved_while_whole(self) -> list[_WatchedParam]:
        """Those that are frozen, and whose whole tensor was written to: torch drops it, and the shard is as before."""
        if tuple(map(_VERSION, self._frozen_wholes)) == self._frozen_versions:
            return []
        return [one for one in self._frozen if one._unsharded_param._version != self._version_made[id(one)]]

    def names_of(self, parameters: Sequence[_WatchedParam]) -> list[str]:
        """The plain names of parameters; `StepModule`, the root, holds the user's module as its own."""
        names = {id(one): name for name, one in self._module.named_parameters()}
        return [names[id(one.sharded_param)].removeprefix("module.") for one in parameters]

    def shards_of_wholes(self) -> dict[int, nn.Parameter]:
        """The shards, by the ids of the tensors that take their place while they are gathered."""
        wholes = ("_unsharded_param", "_sharded_post_forward_param")
        return {
            id(whole): one.sharded_param
            for one in self.parameters
            for whole in map(one.__dict__.get, wholes)
            if whole is not None
        }

    def _list_made(self) -> None:
        made = [one for one in self.parameters if hasattr(one, "_unsharded_param")]
        self._shards = [one.sharded_param for one in made]
        self._wholes = [one._unsharded_param for one in made]
        self._frozen = [one for one in made if not one.sharded_param.requires_grad]
        self._frozen_wholes = [one._unsharded_param for one in self._frozen]
        self._frozen_versions = tuple(self._version_made[id(one)] for one in self._frozen)

    def forget_gradients(self) -> None:
        """Drop what a window has added up and not exchanged."""
        for parameter in self.parameters:
            _set_those_there(parameter, unsharded_accumulated_grad=None)  # torch 2.15 adds up in the gradient itself
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def undo_sharding(root: nn.Module) -> None:
    """Make all modules what they were before `fully_shard`, save that they hold shards. Talks to nobody."""
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
            for ours in ("watcher", "casts"):
                group.__dict__.pop(ours, None)
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
            # These hold the process group, and each other: peers blocked in it fall out only once it is let go.
            group.fsdp_params = []
            group.mesh_info = group.post_forward_mesh_info = None
        _set_those_there(state, _fsdp_param_groups=[], _fsdp_param_group=None)
        state._comm_ctx.post_forward_order = []
        state._comm_ctx.all_gather_state = None
        _set_those_there(state._comm_ctx, reduce_scatter_states=[], reduce_scatter_state=None)
        state._state_ctx.all_states = []
        plain: Any = module
        for key in (STATE_KEY, REGISTRY_KEY):
            plain.__dict__.pop(key, None)
        _module_state_mapping.pop(plain, None)
        plain.__class__ = type(plain).__mro__[module._orig_cls_mro_index]


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of one module. torch 2.11 knows one or None, later versions a list."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _set_those_there(owner: Any, **values: Any) -> None:
    """Set attributes, under the names that this version of torch has for them."""
    for name, value in values.items():
        if name in owner.__dict__:
            setattr(owner, name, value)


def forget_original(parameter: nn.Parameter) -> None:
    """Take off a parameter what `fully_shard` wrote on it."""
    parameter.__dict__.pop("_fsdp_orig_uid", None)


def remove_tensor_parallel_hooks(module: nn.Module) -> None:
    """Take off what `parallelize_module` put on a module: hooks that need a mesh that is gone, and a ban on another."""
    for child in module.modules():
        child.__dict__.pop("_distribute_module_applied", None)
        for hooks in (child._forward_pre_hooks, child._forward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed.tensor"):
                    del hooks[key]


def forget_meshes(device: torch.device | None = None) -> None:
    """Empty DTensor's caches of how operations lay out their results.

    Meshes are equal by their sizes and names: a result computed in a later run would be given the mesh of an earlier
    one, whose process groups are gone ("Could not resolve the process group registered under the name ...").

    Args:
        device: on which backward had operations of DTensors. Each thread has caches of its own, and those of a device's
            backward run in a thread of autograd's; one of the CPU's runs in its caller's.
    """
    _empty_caches()
    if device is not None and device.type != "cpu":
        with suppress(RuntimeError), torch.enable_grad():  # a device that has failed runs nothing more
            start = torch.zeros((), device=device, requires_grad=True)
            _EmptyingBehind.apply(start).backward()  # type: ignore[no-untyped-call]


class _EmptyingBehind(torch.autograd.Function):
    """Empties the caches of the thread in which its backward runs."""

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


def let_go(mesh: DeviceMesh) -> None:
    """Drop the process groups that a mesh holds on to.

    Tensors that are kept, be it in a traceback, keep their mesh; and as long as anybody keeps a group, peers that are
    blocked in it wait for this rank.
    """
    for one in (mesh, mesh._get_root_mesh()):
        one._pg_registry.clear()


def local_region(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of ``tensor`` begins in the whole, and its sizes; split twice along one dimension too."""
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)
