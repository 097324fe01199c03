"""Handwritten digits: a small classifier that reaches more than 95% accuracy on held-out images in a few seconds.

python examples/digits.py [--devices 2]
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import EarlyStopping


class Classifier(TrainModule):
    def __init__(self, width: int = 128, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, fused=True)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1797 images of 8 x 8 gray values with their digits, split into training and held-out sets (20%)."""
    values, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(digits)
    train, held_out = train_test_split(range(len(digits)), test_size=0.2, stratify=digits, random_state=0)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-epochs", type=int, default=40)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    options = parser.parse_args()

    train, held_out = load_data()
    fit = Fit(**vars(options), callbacks=EarlyStopping("val_loss", patience=5), seed=0, log_every_n_steps=10)
    torch.manual_seed(0)
    model = Classifier()
    fit.fit(model, DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=128))

    predicted = torch.cat(fit.predict(model, DataLoader(held_out, batch_size=128)))
    labels = held_out.tensors[1]
    wrong = (predicted != labels).nonzero().flatten().tolist()
    count = len(labels)
    fit.print(f"{count - len(wrong)} of {count} held-out digits are classified correctly: {1 - len(wrong) / count:.1%}")
    for i in wrong[:5]:
        fit.print(f"  image {i} shows a {labels[i]}, classified as a {predicted[i]}")


if __name__ == "__main__":
    main()
