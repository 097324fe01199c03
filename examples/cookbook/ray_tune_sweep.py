"""A sweep with Ray Tune: each trial runs in its own process, and as many trials run at once as there are CPUs.

Common mistake: letting torch use all CPUs. A trial has one CPU unless it requests more, but torch starts as many
threads as the machine has CPUs. Also, a trial has its own working directory, so relative paths point elsewhere. The
trainable is pickled for the workers, so pass data with `tune.with_parameters` instead of a global variable. In this
recipe, a trial has one device.
"""

from pathlib import Path

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule, seed_everything


class Reporting(Callback):
    """Reports metrics to Tune after each validation."""

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            tune.report({name: value.item() for name, value in trainer.callback_metrics.items()})


class Classifier(TrainModule):
    def __init__(self, width: int, lr: float):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch):
        images, labels = batch
        self.log("val_accuracy", (self.net(images).argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, fused=True)


def train(config: dict, train_data: TensorDataset, val_data: TensorDataset) -> None:
    torch.set_num_threads(1)  # as many as the trial's CPUs
    seed_everything(0)
    fit = Fit(max_epochs=8, callbacks=Reporting(), seed=0)
    loaders = DataLoader(train_data, batch_size=50, shuffle=True), DataLoader(val_data, batch_size=400)
    fit.fit(Classifier(**config), *loaders)


def main() -> None:
    values, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(digits)
    data = {
        "train_data": TensorDataset(images[:1400], labels[:1400]),
        "val_data": TensorDataset(images[1400:], labels[1400:]),
    }
    scheduler = ASHAScheduler(metric="val_accuracy", mode="max", max_t=8, grace_period=2)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(train, **data), {"cpu": 1}),
        param_space={"width": tune.choice([16, 64]), "lr": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(scheduler=scheduler, num_samples=4),
        run_config=tune.RunConfig(storage_path=str(Path("ray_results").resolve())),
    )
    results = tuner.fit()
    best = results.get_best_result("val_accuracy", "max")
    early = sum(result.metrics["training_iteration"] < 8 for result in results)
    print(
        f"Accuracy {best.metrics['val_accuracy']:.1%} with {best.config}; {early} of {len(results)} trials ended early"
    )


if __name__ == "__main__":
    main()
