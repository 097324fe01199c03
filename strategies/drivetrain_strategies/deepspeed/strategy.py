"""DeepSpeedStrategy: trains with ZeRO on DeepSpeed's engine, which runs the backward, the exchange and the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.precision import Precision
from drivetrain.strategies import (
    DEFAULT_STEP_TIMEOUT,
    DEFAULT_TIMEOUT,
    DistributedStrategy,
    Region,
    StepRunner,
)
from drivetrain_strategies._changed_forwards import Checkpointing, ForwardSwap, checkpointing_advice
from drivetrain_strategies._deferred_init import DeferredModule
from drivetrain_strategies._gathering import GATHER_LIMIT
from drivetrain_strategies._module_checks import refuse_absent_classes
from drivetrain_strategies.deepspeed._checks import (
    add_param_group_error,
    check_module,
    check_optimizers,
    check_trainable,
    clip_by_value_error,
    is_known,
)
from drivetrain_strategies.deepspeed._cleanup import communication
from drivetrain_strategies.deepspeed._config import Config, combine, offload, resolve
from drivetrain_strategies.deepspeed._engine_run import DeepSpeedRun
from drivetrain_strategies.deepspeed._error_messages import check_operations, explain_compilation_errors
from drivetrain_strategies.deepspeed._library import check_library, import_library, redirected_log
from drivetrain_strategies.deepspeed._precision import DeepSpeedPrecision, check_fp16
from drivetrain_strategies.single_device import OriginalDevice


class DeepSpeedStrategy(DistributedStrategy):
    """ZeRO stages 1, 2 and 3 with the package `deepspeed`.

    ``Fit`` scales and accumulates gradients itself, so that the average is exact for accumulation windows of any length
    and weight. DeepSpeed's ``gradient_accumulation_steps`` is therefore always 1.

    Args:
        stage: 1 shards optimizer state, 2 shards gradients too, and 3 shards parameters too. None uses the config's
            stage, or 2 if the config sets no stage.
        offload_optimizer: where optimizer state is kept, "cpu" or "nvme".
        offload_parameters: where partitions of parameters are kept at stage 3, "cpu" or "nvme".
        config: DeepSpeed's configuration, a dict or the path of a JSON file. Missing keys are set from `Fit`.
        nvme_path: the folder on the drive to which "nvme" writes.
        communication_data_type: dtype in which gradients are exchanged, "fp32", "bf16" or "fp16".
        leaf_modules: classes of modules that stage 3 gathers and exchanges as a whole, such as blocks of experts.
        activation_checkpointing: classes of modules whose activations are recomputed in backward.
        activation_policy: which results are saved rather than recomputed. "full" saves none, "save_attention" saves
            those of attention, and "save_matmuls" also those of matrix products.
        find_unused_parameters: None refuses parameters that only some ranks use, or that become used or unused after
            the first accumulation window. True allows such parameters, and makes stage 2 exchange gradients after
            backward. False does not check.
        gather_limit: size in bytes up to which the parameters are gathered after a run. Those of a larger module are
            on the meta device then.
        meta: at stage 3, build layers of ``configure_model`` on the meta device and initialise the layers one by one.
        process_group_backend: backend of the process group. None selects gloo on the CPU and NCCL on CUDA.
        timeout: time after which a collective that a rank does not join fails: a timedelta, or seconds.
        step_timeout: replaces ``timeout`` after the first step; None keeps ``timeout``.
        **zero_optimization: settings of this section of DeepSpeed's configuration, such as ``reduce_bucket_size``.

    Raises:
        ConfigurationError: deepspeed is missing or too old, or arguments and config contradict each other.
    """

    name: ClassVar[str] = "deepspeed"
    accepts_none_loss: ClassVar[bool] = False
    has_hook_contexts: ClassVar[bool] = True

    def __init__(
        self,
        stage: int | None = None,
        offload_optimizer: str | None = None,
        offload_parameters: str | None = None,
        config: Config = None,
        nvme_path: str | None = None,
        communication_data_type: str | None = None,
        leaf_modules: Sequence[type[nn.Module]] | None = None,
        activation_checkpointing: Sequence[type[nn.Module]] | None = None,
        activation_policy: str = "full",
        find_unused_parameters: bool | None = None,
        gather_limit: int = GATHER_LIMIT,
        meta: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        step_timeout: timedelta | float | None = DEFAULT_STEP_TIMEOUT,
        **zero_optimization: Any,
    ) -> None:
        super().__init__(process_group_backend, timeout, step_timeout)
        check_library()
        zero = {
            "stage": stage,
            "offload_optimizer": offload(offload_optimizer, "offload_optimizer", nvme_path),
            "offload_param": offload(offload_parameters, "offload_parameters", nvme_path),
        }
        arguments = {"zero_optimization": _without_none(zero), "communication_data_type": communication_data_type}
        self._config = combine(
            config, {"zero_optimization": _without_none(zero_optimization)}, _without_none(arguments)
        )
        self.stage: int = self._config["zero_optimization"]["stage"]
        self.leaf_modules = tuple(leaf_modules or ())
        self.activation_checkpointing = activation_checkpointing
        self.find_unused_parameters = find_unused_parameters
        self.gather_limit = gather_limit
        self.meta = meta
        self.resolved_config: dict[str, Any] | None = None
        """The configuration that was passed to DeepSpeed in the last run."""
        self.collective_forward = self.shards_parameters = self.stage == 3
        self._checkpointing = Checkpointing(activation_policy)
        self._reset()

    def _reset(self) -> None:
        """Clear everything that belongs to one run."""
        self.schedulers = []
        self._deepspeed: Any = None
        self._undo = ExitStack()
        """Undoes what this strategy and DeepSpeed have changed, the last change first."""
        self._deferred_module = DeferredModule()
        self._run: DeepSpeedRun | None = None
        self._max_norm: float | None = None
        self._trainable_at_start: dict[str, tuple[nn.Parameter, bool]] = {}

    # Placement and the process group

    def bind(self, placement: Placement, device: torch.device, precision: Precision, store: Any = None) -> None:
        super().bind(placement, device, DeepSpeedPrecision.equivalent_to(precision, device), store)

    def setup_environment(self) -> None:
        self._deepspeed = import_library()
        self._undo.enter_context(redirected_log())
        if self.precision.name == "16-mixed":
            # This check runs before any process group is created. A rank that failed while groups are created would
            # break the connections that other ranks are opening.
            check_fp16(self.device)
        super().setup_environment()
        self._undo.enter_context(communication(self._deepspeed, self.device, self.local_rank))

    # Set-up of the module and its optimizers

    def module_init_context(self) -> AbstractContextManager[Any]:
        context = super().module_init_context()
        return self._deferred_module.record_on_meta(context) if self.meta and self.stage == 3 else context

    def optimizer_init_context(self) -> AbstractContextManager[Any]:
        return explain_compilation_errors()

    def check(self, module: nn.Module) -> None:
        super().check(module)
        check_module(module, self.settings, mixed=self._half_dtype is not None)
        if self.stage == 3:
            refuse_absent_classes(module, self.leaf_modules, "leaf_modules")
        self.resolved_config = resolve(self._config, self.settings, self.precision.name, self.world_size)
        check_operations(self.resolved_config, trains=self.settings.stage == "fit")

    @property
    def _half_dtype(self) -> torch.dtype | None:
        assert isinstance(self.precision, DeepSpeedPrecision)
        return self.precision.half_dtype

    def setup_module(self, module: nn.Module) -> StepRunner:
        # The engine wraps the module only in `setup_optimizers`, because configure_optimizers must find parameters in
        # their original shapes, and because the returned optimizers may be refused.
        self.module = module
        self._undo.callback(OriginalDevice(module).restore)
        swap = ForwardSwap()
        self._undo.callback(swap.undo)
        if self._half_dtype is not None:
            swap.keep_norms_in_float32(module)
        swap.checkpoint(module, self.activation_checkpointing, self._checkpointing)

        def run(step: Callable[..., Any], *args: Any) -> Any:
            assert self._run is not None
            return self._run.forward(step, *args)

        return run

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        module, config = self.module, self.resolved_config
        assert module is not None
        assert config is not None
        assert isinstance(self.precision, DeepSpeedPrecision)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        declared = optimizers if self._config.get("zero_allow_untested_optimizer") else self.elementwise_optimizers
        check_optimizers(optimizers, declared, self._config, names, self.settings, self.stage)
        self._run = DeepSpeedRun(
            self._deepspeed,
            module,
            config,
            self.device,
            self.precision,
            self.control,
            self.leaf_modules,
            self.find_unused_parameters,
            self.gather_limit,
        )
        self._undo.callback(self._run.end)
        self._run.start(optimizers, self._deferred_module)
        self.schedulers = self._run.schedulers
        self._trainable_at_start = {
            name: (parameter, parameter.requires_grad) for name, parameter in module.named_parameters()
        }
        return super().setup_optimizers(self._run.optimizers)

    # Trainable parameters

    def broadcast_module(self, module: nn.Module) -> None:
        """Do nothing, since `DeepSpeedRun.start` has broadcast the weights."""

    def trainable_changed(self, module: nn.Module) -> None:
        check_trainable(module, self._trainable_at_start)

    def check_added_group(self, optimizer: Optimizer) -> None:
        raise add_param_group_error(optimizer)

    def hook_context(self, name: str, window_is_complete: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._run is None else self._run.hook_context(name)

    # During a step: backward, clipping and optimizer step

    def backward(self, loss: torch.Tensor) -> None:
        self._active_run.backward(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Do nothing, since DeepSpeed manages the gradients and reports their unscaled norm."""

    def clip_gradients(
        self, optimizer: Optimizer | Sequence[Optimizer], max_norm: float, algorithm: str = "norm"
    ) -> torch.Tensor:
        """Make the next step clip to the smallest requested norm; return the norm before clipping."""
        if algorithm != "norm":
            raise clip_by_value_error()
        self._max_norm = max_norm if self._max_norm is None else min(max_norm, self._max_norm)
        return self._active_run.zero.norm()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if closure is not None:
            if not is_known(optimizer):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} steps with a closure under DeepSpeed.",
                    "DeepSpeed's engine steps the optimizer, and cannot evaluate a closure within the step.",
                    "use strategy='fsdp' or 'ddp'.",
                )
            closure()  # torch's element-wise optimizers evaluate it once, before anything else
        max_norm, self._max_norm = self._max_norm, None
        return self._active_run.step(max_norm)

    def finish_step(self) -> None:
        """Do nothing, since DeepSpeed's step updates the loss scale."""

    def forget_gradients(self) -> None:
        self._max_norm = None
        self._active_run.forget()

    def requiring_grad_only_for(self, optimizer: Any) -> AbstractContextManager[None]:
        return nullcontext()  # there is one optimizer, and only its parameters are trainable

    @property
    def _active_run(self) -> DeepSpeedRun:
        if self._run is None:
            raise ConfigurationError(
                "This DeepSpeedStrategy is not running.",
                "DeepSpeed's engine exists only while fit, validate, test or predict runs.",
                "call this method in a hook such as on_fit_start or on_train_end.",
            )
        return self._run

    # Whole parameters

    @contextmanager
    def gathered(
        self, parameters: nn.Parameter | Iterable[nn.Parameter] | None = None, write: bool = True
    ) -> Iterator[None]:
        """Gather parameters within this context, in float32. Call this method on every rank.

        Outside the context, parameters are empty at stage 3. If ``write`` is set, rank 0's values are kept on all ranks
        and in the master weights.

        Args:
            parameters: parameters of the module; None gathers all parameters.
            write: keep changes made within the context; False discards changes.
        """
        run = self._active_run
        if parameters is None:
            assert self.module is not None
            parameters = self.module.parameters()
        wanted = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
        with run.state().gathered(wanted, self.device, write):
            yield

    # Weights and optimizer state of a checkpoint

    def model_state(self) -> dict[str, Any]:
        return super().model_state() if self._run is None else self._run.state().weights()

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        if self.module is not None:
            self._active_run.state().load_weights(state, strict)

    def optimizer_state(self, index: int = 0) -> dict[str, Any]:
        return self._active_run.state().optimizer()

    def load_optimizer_state(self, state: Mapping[str, Any], index: int = 0) -> None:
        self._active_run.state().load_optimizer(state)

    def model_regions(self) -> dict[str, Region]:
        return {} if self._run is None else self._run.state().regions()

    def optimizer_regions(self, index: int = 0) -> dict[str, Region]:
        return self._active_run.state().optimizer_regions()

    # Advice after an out-of-memory error

    def memory_advice(self, module: nn.Module) -> Sequence[str]:
        if self.stage < 3:
            text = f"strategy='deepspeed_stage_{self.stage + 1}': shards more of the training state over the ranks"
        else:
            text = "strategy='deepspeed_stage_3_offload': parameters and optimizer state are kept in host memory"
        advice = [text]
        if not self.activation_checkpointing:
            advice.append(checkpointing_advice(type(self)))
        return advice

    # Teardown

    def restore_module(self) -> None:
        if self.module is not None and self._run is not None:
            self.sync_buffers(self.module)
            self._run.restore()

    def teardown(self) -> None:
        self._undo.close()
        self._reset()
        super().teardown()


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
