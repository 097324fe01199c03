"""k-fold cross-validation: every sample is predicted once, by a module that was not trained on it.

Common mistake: sharing one module, callback or fitted scaler among the folds. The held-out part of the second fold was
training data of the first fold, so the score wrongly rises from fold to fold. Build everything within the loop, from
the same seed.
"""

import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule, seed_everything


class Classifier(TrainModule):
    def __init__(self, mean: torch.Tensor, std: torch.Tensor):
        super().__init__()
        self.register_buffer("mean", mean)  # saved in checkpoints together with the weights
        self.register_buffer("std", std)
        self.net = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, batch):
        return self.net((batch[0] - self.mean) / self.std)

    def training_step(self, batch):
        return F.cross_entropy(self(batch), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def main() -> None:
    values, kinds = load_wine(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32), torch.tensor(kinds)
    predicted = torch.full_like(y, -1)
    scores = []
    for train, held_out in StratifiedKFold(5, shuffle=True, random_state=0).split(x, y):
        seed_everything(0)  # the same initial weights in each fold
        module = Classifier(x[train].mean(0), x[train].std(0))  # statistics of this fold's training data only
        fit = Fit(max_epochs=15, seed=0)
        fit.fit(module, DataLoader(TensorDataset(x[train], y[train]), batch_size=16, shuffle=True))
        loader = DataLoader(TensorDataset(x[held_out], y[held_out]), batch_size=64)
        predicted[held_out] = torch.cat(fit.predict(module, loader)).argmax(-1)
        scores.append((predicted[held_out] == y[held_out]).float().mean())

    fold_scores = torch.stack(scores)
    accuracy = (predicted == y).float().mean()
    print(f"{(predicted >= 0).sum()} of {len(y)} samples predicted, {accuracy:.1%} of them correctly")
    print(f"Accuracy over 5 folds: {fold_scores.mean():.3f}, standard deviation {fold_scores.std():.3f}")


if __name__ == "__main__":
    main()
