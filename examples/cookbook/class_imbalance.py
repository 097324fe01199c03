"""Class imbalance: one image in fifty shows an 8, so a detector that never reports one has 98% accuracy.

Common mistake: `cross_entropy(weight=...)` with gradient accumulation, or on several devices. The loss is divided by
the sum of the class weights in the micro-batch. The mean over micro-batches is then not the weighted mean over the
batch, because micro-batches without an 8 count as much as micro-batches with one. `batch_weight` returns the divisor of
each micro-batch, so that the engine can weight the micro-batches exactly.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule, seed_everything


class Detector(TrainModule):
    def __init__(self, class_weights: Tensor):
        super().__init__()
        self.class_weights = class_weights  # on the CPU, where batch_weight is computed
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels, self.class_weights.to(images))

    def batch_weight(self, batch):
        return self.class_weights[batch[1]].sum()  # the divisor that cross_entropy uses

    def predict_step(self, batch):
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


def main() -> None:
    values, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(values, dtype=torch.float32) / 16, (torch.tensor(digits) == 8).long()
    train, held_out = torch.arange(len(labels)) < 1200, torch.arange(len(labels)) >= 1200
    train[labels.nonzero()[20:, 0]] = False  # keep only 20 images of an 8
    data = TensorDataset(images[train], labels[train])
    test = DataLoader(TensorDataset(images[held_out], labels[held_out]), batch_size=600)
    balanced = 1 / torch.bincount(labels[train])

    def trained(weights: Tensor, batch_size: int, accumulate: int = 1) -> Detector:
        seed_everything(0)
        module = Detector(weights)
        fit = Fit(max_epochs=20, accumulate_grad_batches=accumulate, seed=0)
        fit.fit(module, DataLoader(data, batch_size, shuffle=True))
        return module

    plain, weighted, split = trained(torch.ones(2), 64), trained(balanced, 64), trained(balanced, 16, accumulate=4)
    for name, module in ("without weights", plain), ("with weights", weighted):
        says_eight = torch.cat(Fit().predict(module, test)) == 1
        is_eight = labels[held_out] == 1
        recall, false_positives = says_eight[is_eight].float().mean(), says_eight[~is_eight].float().mean()
        print(f"{name.capitalize()}: recall {recall:.1%}, false positive rate {false_positives:.1%}")
    pairs = zip(weighted.parameters(), split.parameters(), strict=True)
    print(f"Batches of 64 and 4 x 16 end within {max((a - b).abs().max().item() for a, b in pairs):.1e} of each other")


if __name__ == "__main__":
    main()
