"""Several optimizers: Muon for matrices and AdamW for the rest, each with its own schedule, after one backward pass.

Common mistake: separate rules for the parameters of each optimizer. Parameters that match neither rule are never
trained (a warning names them), so give the second optimizer all parameters that the first does not have. Also, a
schedule steps once per epoch unless `"interval": "step"` is set, so a cosine schedule over 280 steps would barely
change the learning rate in 10 epochs.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule, seed_everything


class Classifier(TrainModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.head = nn.Linear(128, 10)

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def test_step(self, batch):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        matrices = [p for p in self.body.parameters() if p.ndim == 2]  # without the head, for which AdamW is better
        matrix_ids = {id(p) for p in matrices}
        rest = [p for p in self.parameters() if id(p) not in matrix_ids]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3, fused=True)]
        steps = self.trainer.estimated_stepping_batches
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) for optimizer in optimizers]
        return optimizers, [{"scheduler": schedule, "interval": "step"} for schedule in schedules]


def main() -> None:
    seed_everything(0)
    values, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(digits)
    module = Classifier()
    before = [p.detach().clone() for p in module.parameters()]
    fit = Fit(max_epochs=10, gradient_clip_val=1.0, seed=0)
    fit.fit(module, DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=50, shuffle=True))

    rates = [schedule.get_last_lr()[0] for schedule in fit.lr_schedulers]
    [result] = fit.test(module, DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=400), verbose=False)
    moved = sum(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    print(f"{moved} of {len(before)} parameters have trained; the learning rates ended at {rates}")
    print(f"Accuracy: {result['accuracy']:.1%}")


if __name__ == "__main__":
    main()
