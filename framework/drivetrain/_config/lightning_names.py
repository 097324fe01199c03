"""Attributes of Lightning's trainers and strategies that drivetrain lacks, each with the text of a replacement."""

from __future__ import annotations

_CALLBACKS = "write a Callback: its hooks are called at these moments"
_LOOPS = (
    "read trainer.current_epoch, .global_step, .batch_idx, .is_last_batch and .should_stop; to control the steps, set "
    "self.automatic_optimization = False in the module"
)
_TRAINER_REPLACEMENTS = {
    **dict.fromkeys(("fit_loop", "validate_loop", "test_loop", "predict_loop"), _LOOPS),
    "logger_connector": "read trainer.callback_metrics, .logged_metrics and .progress_bar_metrics",
    "checkpoint_connector": "use trainer.save_checkpoint(path), and fit(ckpt_path=...)",
    "data_connector": "read trainer.train_dataloader and .val_dataloaders, or return loaders from a DataModule",
    "callback_connector": "read or append to trainer.callbacks",
    "signal_connector": "read trainer.received_sigterm; Fit(preemption_signals=...) sets which signals end a run",
    "accelerator_connector": "read trainer.strategy, .precision, .num_devices and .device_ids",
    "precision_plugin": "read trainer.precision",
    "accelerator_backend": "read trainer.strategy.device",
    "training_type_plugin": "read trainer.strategy",
    "root_gpu": "read trainer.strategy.root_device",
    "gpus": "read trainer.num_devices or trainer.device_ids",
    "num_gpus": "read trainer.num_devices",
    "tpu_cores": "read trainer.num_devices",
    "root_device": "read trainer.strategy.root_device",
    "lightning_optimizers": "read trainer.optimizers",
    "optimizer_frequencies": "set self.automatic_optimization = False, and step the optimizers in training_step",
    "weights_save_path": "read trainer.default_root_dir, or give Checkpoint(dirpath=...)",
    "resume_from_checkpoint": "pass fit(ckpt_path=...)",
    "data_parallel_device_ids": "read trainer.device_ids",
    "world_rank": "read trainer.global_rank",
    "is_overridden": "check whether the class defines the method",
    "tune": "use drivetrain.tuner",
    "tuner": "use drivetrain.tuner",
    "call_hook": _CALLBACKS,
    "add_callback": "append to trainer.callbacks before the run, or pass Fit(callbacks=...)",
    "reset_train_dataloader": "return loaders from a DataModule, whose loader methods each run calls",
    "reset_val_dataloader": "return loaders from a DataModule, whose loader methods each run calls",
    "print_nan_gradients": "use detect_anomaly=True or the NonFiniteGuard callback",
    "terminate_on_nan": "use the NonFiniteGuard callback",
    "track_grad_norm": "read trainer.gradient_norm",
    "weights_summary": "pass Fit(enable_model_summary=...)",
    "progress_bar_dict": "read trainer.progress_bar_metrics",
    "disable_validation": "read trainer.enable_validation",
    "sanity_checker": "read trainer.sanity_checking",
    "should_rank_save_checkpoint": "every rank calls trainer.save_checkpoint(path)",
    "use_amp": "read trainer.precision.name",
    "amp_backend": "read trainer.precision.name",
    "prediction_writer_callbacks": "look in trainer.callbacks for BasePredictionWriter",
}
_STRATEGY_REPLACEMENTS = {
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


def trainer_attribute_error(kind: str, name: str) -> str:
    """Return the message of the AttributeError for ``trainer.<name>``."""
    return _text(kind, name, _TRAINER_REPLACEMENTS)


def strategy_attribute_error(kind: str, name: str) -> str:
    """Return the message of the AttributeError for ``trainer.strategy.<name>``."""
    return _text(kind, name, _STRATEGY_REPLACEMENTS)


def _text(kind: str, name: str, known: dict[str, str]) -> str:
    message = f"{kind!r} object has no attribute {name!r}"
    plain = name.lstrip("_")
    return f"{message}: {known[plain]}." if plain in known else message
