"""Arguments of other trainers that have another name or place in drivetrain, each with the text of a replacement."""

from __future__ import annotations

_DEVICES = "use devices=, and accelerator='gpu' if the type matters"
_EPOCHS = "use max_epochs="
_WINDOW = "use accumulate_grad_batches="
_CLIPPING = "use gradient_clip_val="
_LOGGING = "use log_every_n_steps="
_SAVING = "use enable_checkpointing=; a drivetrain.callbacks.Checkpoint(...) in callbacks= sets when and where"
_RESUMING = "pass the path to the run: fit(..., ckpt_path=...)"
_FOLDER = "use default_root_dir="
_SANITY = "use num_sanity_val_steps="
_BATCH = "pass the size to DataLoader(data, batch_size=...)"
_OPTIMIZER = "return the optimizer from the module's configure_optimizers"
_SCHEDULER = "return the scheduler with the optimizer from the module's configure_optimizers"
_STOPPING = "put drivetrain.callbacks.EarlyStopping(...) in callbacks="
_VALIDATING = "use val_check_interval= for micro-batches, or check_val_every_n_epoch="
_BY_CALLBACK = "put drivetrain.callbacks.NonFiniteGuard() in callbacks=, or use detect_anomaly=True"
_PRECISION = "use precision='16-mixed' or 'bf16-mixed'"

REPLACEMENTS: dict[str, str] = {
    # Devices and processes
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "num_processes", "nproc_per_node", "world_size"), _DEVICES),
    **dict.fromkeys(("device", "gpu", "cuda", "no_cuda", "use_cpu"), "use accelerator='gpu' or 'cpu', and devices="),
    **dict.fromkeys(
        ("tpu_cores", "ipus", "auto_select_gpus"), "use accelerator= and devices=; only CPUs and GPUs are supported"
    ),
    **dict.fromkeys(("nodes", "nnodes"), "use num_nodes="),
    **dict.fromkeys(
        ("distributed_backend", "parallel", "backend"), "use strategy='ddp', 'fsdp' or 'deepspeed_stage_2'"
    ),
    "ddp": "use strategy='ddp'",
    "fsdp": "use strategy='fsdp'",
    "fsdp_config": "use strategy=FSDPStrategy(...)",
    "deepspeed": "use strategy='deepspeed_stage_2', or strategy=DeepSpeedStrategy(config=...)",
    "deepspeed_plugin": "use strategy=DeepSpeedStrategy(...)",
    "ddp_find_unused_parameters": "use strategy='ddp_find_unused_parameters_true'",
    "find_unused_parameters": "use strategy=DDPStrategy(find_unused_parameters=True)",
    "sync_batch_norm": "use sync_batchnorm=",
    **dict.fromkeys(("replace_sampler_ddp", "replace_sampler"), "use use_distributed_sampler="),
    # Precision
    "fp16": "use precision='16-mixed'",
    "bf16": "use precision='bf16-mixed'",
    **dict.fromkeys(("amp", "use_amp", "amp_backend", "amp_level", "mixed_precision", "dtype"), _PRECISION),
    # Length of the run
    **dict.fromkeys(("epochs", "epoch", "n_epochs", "num_epochs", "max_nb_epochs", "num_train_epochs"), _EPOCHS),
    "min_nb_epochs": "use min_epochs=",
    **dict.fromkeys(("steps", "n_steps", "num_steps", "max_iters", "num_train_steps"), "use max_steps="),
    **dict.fromkeys(
        ("max_steps_per_epoch", "steps_per_epoch", "train_percent_check", "num_train_batches"),
        "use limit_train_batches=, with an int for micro-batches",
    ),
    **dict.fromkeys(("validation_steps", "val_percent_check", "eval_steps_per_epoch"), "use limit_val_batches="),
    "test_percent_check": "use limit_test_batches=",
    **dict.fromkeys(("patience", "early_stop_callback", "early_stopping"), _STOPPING),
    # Steps
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulation_steps", "grad_accum", "grad_accumulation", "accumulate_grad"),
        _WINDOW,
    ),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip", "clip_grad_norm", "clip_norm"), _CLIPPING),
    **dict.fromkeys(("lr", "learning_rate", "optimizer", "optimizers", "weight_decay"), _OPTIMIZER),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type", "warmup_steps"), _SCHEDULER),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), _BATCH),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "pass the number to DataLoader(..., num_workers=)"),
    **dict.fromkeys(("terminate_on_nan", "detect_nan"), _BY_CALLBACK),
    # Validation
    **dict.fromkeys(("val_interval", "eval_interval", "eval_steps", "validate_every", "eval_every"), _VALIDATING),
    **dict.fromkeys(("nb_sanity_val_steps", "sanity_val_steps", "sanity_check"), _SANITY),
    # Output
    **dict.fromkeys(("row_log_interval", "logging_steps", "log_interval", "log_every"), _LOGGING),
    "flush_logs_every_n_steps": "pass the number to the logger: CSVLogger(..., flush_logs_every_n_steps=)",
    **dict.fromkeys(("progress_bar", "show_progress_bar", "disable_tqdm"), "use enable_progress_bar="),
    "progress_bar_refresh_rate": "put drivetrain.callbacks.ProgressBar(refresh_rate=...) in callbacks=",
    **dict.fromkeys(("weights_summary", "model_summary"), "use enable_model_summary="),
    **dict.fromkeys(("checkpoint_callback", "checkpointing", "save_steps", "save_every"), _SAVING),
    **dict.fromkeys(
        ("weights_save_path", "root_dir", "save_dir", "output_dir", "log_dir", "logging_dir", "workdir"), _FOLDER
    ),
    **dict.fromkeys(("resume_from_checkpoint", "resume", "ckpt_path", "checkpoint_path"), _RESUMING),
    **dict.fromkeys(("loggers", "report_to"), "use logger=, with one logger or a list"),
    "callback": "use callbacks=, with one callback or a list",
    **dict.fromkeys(("random_seed", "manual_seed", "random_state"), "use seed="),
    "enable_autolog_hparams": "call save_hyperparameters(logger=False) in the module to hide them from loggers",
    "model_registry": "after fit, copy the checkpoint at trainer.checkpoint_callback.best_model_path",
    "multiple_trainloader_mode": "pass fit a CombinedLoader(loaders, mode)",
    "track_grad_norm": "read trainer.gradient_norm in on_train_batch_end, and log it",
    "auto_lr_find": "call drivetrain.tuner.Tuner(fit).lr_find(...), or pass LearningRateFinder()",
    "auto_scale_batch_size": "call drivetrain.tuner.Tuner(fit).scale_batch_size(...), or pass BatchSizeFinder()",
    **dict.fromkeys(
        ("model", "module", "train_dataloaders", "datamodule"), "pass the object to the run: fit(module, loader)"
    ),
}
"""Maps the name of an argument of another trainer to the replacement in drivetrain."""


def find_replacement(name: str) -> str | None:
    """Return the replacement for an argument that `Fit` lacks as the text of a fix, or None if none is known."""
    return REPLACEMENTS.get(name.lower())
