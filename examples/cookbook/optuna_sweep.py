"""A sweep with Optuna, in which unpromising trials are pruned.

Common mistake: raising `TrialPruned` within a run. The run is then recorded as failed, and other ranks fail with
another error. Request a stop instead, which takes effect after the same step on all ranks, and raise the exception
after the run. Do not report metrics of the sanity check, which evaluates an untrained model. Also, seed the sampler:
with `Fit(devices=2)`, each rank runs this script and would draw a different learning rate. With the same seed and the
same reported metric, all ranks draw the same learning rate.
"""

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule, seed_everything


class Pruning(Callback):
    """Reports a metric after each validation, and stops a run whose trial is pruned."""

    def __init__(self, trial: optuna.Trial, monitor: str):
        self.trial, self.monitor, self.pruned = trial, monitor, False

    def on_validation_end(self, trainer, module):
        if trainer.sanity_checking:
            return
        self.trial.report(trainer.callback_metrics[self.monitor].item(), trainer.current_epoch)
        if self.trial.should_prune():
            self.pruned = True
            trainer.request_stop(f"trial {self.trial.number} is pruned")


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


def objective(trial: optuna.Trial, devices: int = 1) -> float:
    seed_everything(0)
    module = Classifier(trial.suggest_int("width", 8, 128, log=True), trial.suggest_float("lr", 1e-5, 1e-1, log=True))
    pruning = Pruning(trial, "val_accuracy")
    fit = Fit(devices=devices, max_epochs=8, callbacks=pruning, enable_checkpointing=False, seed=0)
    fit.fit(module, DataLoader(train_data, batch_size=50, shuffle=True), DataLoader(val_data, batch_size=400))
    if pruning.pruned:
        raise optuna.TrialPruned
    return fit.callback_metrics["val_accuracy"].item()


values, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(digits)
train_data, val_data = TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])


def main(devices: int = 1) -> optuna.Study:
    sampler, pruner = optuna.samplers.TPESampler(seed=0), optuna.pruners.MedianPruner(n_startup_trials=3)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(lambda trial: objective(trial, devices), n_trials=10)
    pruned = len(study.get_trials(states=[optuna.trial.TrialState.PRUNED]))
    print(
        f"Accuracy {study.best_value:.1%} with {study.best_params}; {pruned} of {len(study.trials)} trials were pruned"
    )
    return study


if __name__ == "__main__":
    main()
