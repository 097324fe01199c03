"""An EMA teacher: 40% of the labels are random, so the student also learns from a slow average of itself.

Common mistake: updating the teacher in `training_step` or `on_train_batch_end`. With gradient accumulation these run
once per micro-batch, so the average changes faster than intended; `optimizer_step` runs once per step. A teacher
that requires gradients is trained as well, and one with dropout gives noisy targets: freeze it and set it to eval
mode when it is built.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule, seed_everything


class Taught(TrainModule):
    def __init__(self, trust: float, decay: float = 0.995):
        super().__init__()
        self.save_hyperparameters()
        self.student = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()

    def training_step(self, batch):
        images, labels = batch
        taught = self.teacher(images).softmax(-1)
        target = torch.lerp(F.one_hot(labels, 10).to(taught), taught, self.hparams.trust)
        return F.cross_entropy(self.student(images), target)

    def optimizer_step(self, *args, **options):
        super().optimizer_step(*args, **options)
        with torch.no_grad():  # in place and not through .data, so that the engine detects an update that is lost
            for average, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                average.lerp_(weight, 1 - self.hparams.decay)

    def test_step(self, batch):
        images, labels = batch
        for name, network in ("student", self.student), ("teacher", self.teacher):
            self.log(name, (network(images).argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=3e-3)


def main() -> None:
    seed_everything(0)
    values, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(digits)
    noisy = torch.where(torch.rand(len(labels)) < 0.4, torch.randint(10, labels.shape), labels)
    train_loader = DataLoader(TensorDataset(images[:1400], noisy[:1400]), batch_size=50, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=400)

    for name, trust in ("alone", 0.0), ("taught", 0.9):
        module = Taught(trust)
        fit = Fit(max_epochs=30, seed=0)
        fit.fit(module, train_loader)
        [right] = fit.test(module, test_loader, verbose=False)
        print(f"Right, {name}: the student on {right['student']:.1%}, its teacher on {right['teacher']:.1%}")


if __name__ == "__main__":
    main()
