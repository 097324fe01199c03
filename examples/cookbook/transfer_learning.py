"""Transfer learning: a network that was trained on a large dataset learns a new task from a few samples.

Common mistake: training the whole network from the first step. The head is random, and its gradients damage the
pretrained features. Also, the running statistics of a frozen backbone's batch normalization still change with the new
data. `BackboneFinetuning(train_bn=False)` freezes the backbone and these statistics, and later trains the backbone at a
tenth of the head's learning rate.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule, seed_everything
from drivetrain.callbacks import BackboneFinetuning


class Classifier(TrainModule):
    def __init__(self, backbone: nn.Module, classes: int, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters("lr")
        self.backbone = backbone
        self.head = nn.Linear(64, classes)

    def forward(self, images):
        return self.head(self.backbone(images))

    def training_step(self, batch):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def test_step(self, batch):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        # Pass only the trainable parameters, since the callback adds the backbone later as a new group.
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=self.hparams.lr, fused=False)


def new_backbone() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(144, 64), nn.BatchNorm1d(64), nn.ReLU(),
    )  # fmt: skip


def train(module: Classifier, data: TensorDataset, epochs: int, *callbacks) -> None:
    fit = Fit(max_epochs=epochs, callbacks=[*callbacks], seed=0)
    fit.fit(module, DataLoader(data, batch_size=32, shuffle=True))


def main() -> None:
    seed_everything(0)
    values, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(digits)
    large = TensorDataset(images[:1000], labels[:1000])  # the first task: which digit is it?
    small = TensorDataset(images[1000:1040], labels[1000:1040] % 2)  # the second task: is the digit odd?
    held_out = DataLoader(TensorDataset(images[1040:], labels[1040:] % 2), batch_size=400)

    pretrained = Classifier(new_backbone(), classes=10)
    train(pretrained, large, epochs=10)
    modules = {name: Classifier(new_backbone(), classes=2) for name in ("from scratch", "all at once", "head first")}
    for name, module in modules.items():
        if name != "from scratch":
            module.backbone.load_state_dict(pretrained.backbone.state_dict())
    train(modules["from scratch"], small, epochs=40)
    train(modules["all at once"], small, epochs=40)
    train(modules["head first"], small, 40, BackboneFinetuning(unfreeze_backbone_at_epoch=30, train_bn=False))

    for name, module in modules.items():
        [result] = Fit().test(module, held_out, verbose=False)
        print(f"Accuracy with 40 labelled images, {name}: {result['accuracy']:.1%}")


if __name__ == "__main__":
    main()
