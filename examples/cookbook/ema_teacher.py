"""An EMA teacher: 40% of the labels are random, so the student also learns from a moving average of itself.

Common mistake: updating the teacher in `training_step` or `on_train_batch_end`. With gradient accumulation, these hooks
run once per micro-batch, so the average changes faster than intended. `optimizer_step` runs once per optimizer step.
Also, a teacher that requires gradients is trained as well, and a teacher with dropout gives noisy targets. Freeze the
teacher and set it to eval mode when it is built.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule, seed_everything


class MeanTeacher(TrainModule):
    def __init__(self, teacher_weight: float, decay: float = 0.995):
        super().__init__()
        self.save_hyperparameters()
        self.student = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()

    def training_step(self, batch):
        images, labels = batch
        predicted = self.teacher(images).softmax(-1)
        target = torch.lerp(F.one_hot(labels, 10).to(predicted), predicted, self.hparams.teacher_weight)
        return F.cross_entropy(self.student(images), target)

    def optimizer_step(self, *args, **options):
        super().optimizer_step(*args, **options)
        # Update in place, not through .data, so that the engine raises an error if a strategy would lose the update.
        with torch.no_grad():
            for average, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                average.lerp_(weight, 1 - self.hparams.decay)

    def test_step(self, batch):
        images, labels = batch
        for name, network in ("student", self.student), ("teacher", self.teacher):
            self.log(name, (network(images).argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=3e-3, fused=True)


def main() -> None:
    seed_everything(0)
    values, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(digits)
    noisy = torch.where(torch.rand(len(labels)) < 0.4, torch.randint(10, labels.shape), labels)
    train_loader = DataLoader(TensorDataset(images[:1400], noisy[:1400]), batch_size=50, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=400)

    for name, weight in ("without teacher", 0.0), ("with teacher", 0.9):
        module = MeanTeacher(weight)
        fit = Fit(max_epochs=30, seed=0)
        fit.fit(module, train_loader)
        [accuracy] = fit.test(module, test_loader, verbose=False)
        print(f"Accuracy {name}: student {accuracy['student']:.1%}, average {accuracy['teacher']:.1%}")


if __name__ == "__main__":
    main()
