"""Attributes of Lightning's trainers and strategies that drivetrain lacks, each with the text of a replacement."""

from __future__ import annotations

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
    "tuner": "use drivetrain.tuner",
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
