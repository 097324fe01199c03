"""Debugging NaN: the loss is finite, but the model predicts only NaN.

Common mistake: watching only the loss. For two equal inputs the square root is taken at 0, where its slope is infinite.
`torch.where` masks the result too late: the gradient is NaN although the loss is finite. After that step all weights
are NaN, but the mask turns the NaN distances into 0, so the loss stays finite. `NonFiniteGuard`, which is cheap, checks
losses alone. Find the batch and the operation with `Fit(detect_anomaly=True)`, which is slow.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, NonFiniteError, TrainModule, seed_everything
from drivetrain.callbacks import NonFiniteGuard


def masked_too_late(squared: Tensor) -> Tensor:
    return torch.where(squared > 0, squared.sqrt(), 0)  # backward multiplies 0 by infinity


def masked_in_time(squared: Tensor) -> Tensor:
    return torch.where(squared > 0, squared, 1).sqrt() * (squared > 0)  # no square root of 0


class Distances(TrainModule):
    def __init__(self, root):
        super().__init__()
        self.root = root
        self.embed = nn.Linear(4, 4)

    def training_step(self, batch):
        first, second, distance = batch
        squared = (self.embed(first) - self.embed(second)).square().sum(1)
        loss = (self.root(squared) - distance).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(root, **options) -> None:
    seed_everything(0)
    first, second = torch.rand(2, 400, 4)
    second[100] = first[100]  # batch 12 has a pair of equal samples
    data = TensorDataset(first, second, 2 * (first - second).norm(dim=1))
    module, fit = Distances(root), Fit(max_epochs=1, seed=0, **options)
    try:
        fit.fit(module, DataLoader(data, batch_size=8))
        finite = module.embed.weight.isfinite().all()
        print(f"The last loss is {fit.callback_metrics['loss']:.3f}, the weights are {'finite' if finite else 'NaN'}")
    except NonFiniteError as error:
        print(str(error).splitlines()[0])


def main() -> None:
    train(masked_too_late, callbacks=NonFiniteGuard())  # finite loss, NaN weights
    train(masked_too_late, detect_anomaly=True)  # names the batch, 12, and the operation, SqrtBackward0
    train(masked_in_time)


if __name__ == "__main__":
    main()
