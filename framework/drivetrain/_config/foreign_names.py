"""Names of other trainers that have another name or place in drivetrain, each with the text of a replacement."""

from __future__ import annotations

_ARGUMENTS: dict[str, tuple[str, ...]] = {
    # Devices and processes
    "use devices=, and accelerator='gpu' if the type matters": ("gpus", "num_gpus", "num_processes", "world_size"),
    "use accelerator='gpu' or 'cpu', and devices=": ("device", "gpu", "cuda", "no_cuda", "use_cpu"),
    "use accelerator= and devices=; only CPUs and GPUs are supported": ("tpu_cores", "ipus", "auto_select_gpus"),
    "use num_nodes=": ("nodes", "nnodes"),
    "use strategy='ddp', 'fsdp' or 'deepspeed_stage_2'": ("distributed_backend", "backend", "ddp", "fsdp", "deepspeed"),
    "use strategy=FSDPStrategy(...)": ("fsdp_config",),
    "use strategy=DeepSpeedStrategy(...)": ("deepspeed_plugin",),
    "use strategy=DDPStrategy(find_unused_parameters=True)": ("find_unused_parameters", "ddp_find_unused_parameters"),
    "use sync_batchnorm=": ("sync_batch_norm",),
    "use use_distributed_sampler=": ("replace_sampler_ddp",),
    # Precision
    "use precision='16-mixed'": ("fp16",),
    "use precision='bf16-mixed'": ("bf16",),
    "use precision='16-mixed' or 'bf16-mixed'": ("amp", "amp_backend", "amp_level", "mixed_precision", "dtype"),
    # Length of the run
    "use max_epochs=": ("epochs", "epoch", "n_epochs", "num_epochs", "num_train_epochs"),
    "use max_steps=": ("steps", "n_steps", "num_steps", "max_iters", "num_train_steps"),
    "use limit_train_batches=, with an int for micro-batches": ("max_steps_per_epoch", "steps_per_epoch"),
    "use limit_val_batches=": ("validation_steps",),
    "put drivetrain.callbacks.EarlyStopping(...) in callbacks=": ("patience", "early_stop_callback", "early_stopping"),
    # Steps
    "use accumulate_grad_batches=": ("gradient_accumulation_steps", "accumulation_steps", "grad_accum"),
    "use gradient_clip_val=": ("max_grad_norm", "grad_clip", "gradient_clip", "clip_grad_norm"),
    "return the optimizer from the module's configure_optimizers": ("lr", "learning_rate", "optimizer", "weight_decay"),
    "return the scheduler with the optimizer from the module's configure_optimizers": (
        *("scheduler", "lr_scheduler", "lr_scheduler_type", "warmup_steps"),
    ),
    "pass the size to DataLoader(data, batch_size=...)": ("batch_size", "per_device_train_batch_size"),
    "pass the number to DataLoader(..., num_workers=)": ("num_workers", "dataloader_num_workers"),
    "put drivetrain.callbacks.NonFiniteGuard() in callbacks=, or use detect_anomaly=True": ("terminate_on_nan",),
    # Validation
    "use val_check_interval= for micro-batches, or check_val_every_n_epoch=": ("eval_interval", "eval_steps"),
    # Output
    "use log_every_n_steps=": ("logging_steps", "log_interval", "log_every"),
    "pass the number to the logger: CSVLogger(..., flush_logs_every_n_steps=)": ("flush_logs_every_n_steps",),
    "use enable_progress_bar=": ("progress_bar", "show_progress_bar", "disable_tqdm"),
    "put drivetrain.callbacks.ProgressBar(refresh_rate=...) in callbacks=": ("progress_bar_refresh_rate",),
    "use enable_model_summary=": ("weights_summary", "model_summary"),
    "use enable_checkpointing=; a drivetrain.callbacks.Checkpoint(...) in callbacks= sets when and where": (
        *("checkpoint_callback", "checkpointing", "save_steps"),
    ),
    "pass the path to the run: fit(..., ckpt_path=...)": ("resume_from_checkpoint", "resume", "ckpt_path"),
    "use default_root_dir=": ("weights_save_path", "root_dir", "save_dir", "output_dir", "log_dir", "logging_dir"),
    "use logger=, with one logger or a list": ("loggers", "report_to"),
    "use callbacks=, with one callback or a list": ("callback",),
    "use seed=": ("random_seed", "manual_seed", "random_state"),
    "call save_hyperparameters(logger=False) in the module to hide them from loggers": ("enable_autolog_hparams",),
    "after fit, copy the checkpoint at trainer.checkpoint_callback.best_model_path": ("model_registry",),
    "pass fit a CombinedLoader(loaders, mode)": ("multiple_trainloader_mode",),
    "read trainer.gradient_norm in on_train_batch_end, and log it": ("track_grad_norm",),
    "call drivetrain.tuner.Tuner(fit).lr_find(...), or pass LearningRateFinder()": ("auto_lr_find",),
    "call drivetrain.tuner.Tuner(fit).scale_batch_size(...), or pass BatchSizeFinder()": ("auto_scale_batch_size",),
    "pass the object to the run: fit(module, loader)": ("model", "module", "train_dataloaders", "datamodule"),
}
"""Maps each replacement to the arguments of other trainers that it replaces."""

_LOOPS = (
    "read trainer.current_epoch, .global_step, .batch_idx, .is_last_batch and .should_stop; to control the steps, set "
    "self.automatic_optimization = False in the module"
)
TRAINER_ATTRIBUTES = {
    **dict.fromkeys(("fit_loop", "validate_loop", "test_loop", "predict_loop"), _LOOPS),
    "logger_connector": "read trainer.callback_metrics, .logged_metrics and .progress_bar_metrics",
    "checkpoint_connector": "use trainer.save_checkpoint(path), and fit(ckpt_path=...)",
    "data_connector": "read trainer.train_dataloader and .val_dataloaders, or return loaders from a DataModule",
    "callback_connector": "read or append to trainer.callbacks",
    "signal_connector": "read trainer.received_sigterm; Fit(preemption_signals=...) sets which signals end a run",
    "accelerator_connector": "read trainer.strategy, .precision, .num_devices and .device_ids",
    "precision_plugin": "read trainer.precision",
    "tuner": "use drivetrain.tuner",
}
"""Maps attributes of Lightning's ``trainer`` that `Fit` lacks, without leading underscores, to what replaces them."""

STRATEGY_ATTRIBUTES = {
    "model": "read trainer.model, or strategy.module, which strategies do not wrap",
    "lightning_module": "read trainer.lightning_module",
    "precision_plugin": "read strategy.precision",
    "accelerator": "read strategy.device",
    "cluster_environment": "pass Fit(environment=...), and read strategy.placement",
    "checkpoint_io": "checkpoints can be written to any fsspec URL: use trainer.save_checkpoint(url)",
    "lr_scheduler_configs": "read trainer.lr_scheduler_configs",
    "global_rank": "read strategy.rank",
    "is_global_zero": "read trainer.is_global_zero",
    "parallel_devices": "read trainer.device_ids",
    "num_processes": "read trainer.num_devices",
    "num_nodes": "read trainer.num_nodes",
    "distributed_sampler_kwargs": "read trainer.distributed_sampler_kwargs",
}
"""Maps attributes of Lightning's ``trainer.strategy`` that a `Strategy` lacks to what replaces them."""


def find_replacement(name: str) -> str | None:
    """Return the replacement for an argument that `Fit` lacks as the text of a fix, or None if none is known."""
    return next((replacement for replacement, names in _ARGUMENTS.items() if name.lower() in names), None)
