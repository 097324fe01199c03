"""Logging images: the model's output for a few samples in TensorBoard, once per epoch.

Common mistake: logging in every step. Images are copied from the device, which must wait for the copy. Keep the samples
of one validation batch and log them at the end of the epoch, but not in the sanity check, which runs before any
training. You need not check the rank, because loggers of ranks above 0 write nothing.
"""

import torch
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Fit, TrainModule, seed_everything
from drivetrain.loggers import TensorBoardLogger


class Autoencoder(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8), nn.Linear(8, 128), nn.GELU())
        self.out = nn.Linear(128, 64)

    def forward(self, images):
        return self.out(self.net(images)).sigmoid()

    def training_step(self, images):
        return F.mse_loss(self(images), images)

    def validation_step(self, images, batch_idx):
        reconstructed = self(images)
        self.log("val_loss", F.mse_loss(reconstructed, images))
        if batch_idx == 0:
            self.samples = torch.stack([images[:8], reconstructed[:8]])

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            rows = self.samples.view(2, 8, 8, 8).transpose(1, 2).reshape(1, 16, 64)  # (channel, height, width)
            self.logger.log_image("inputs, reconstructions", rows, self.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


def main() -> None:
    seed_everything(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    logger = TensorBoardLogger("runs")
    fit = Fit(max_epochs=5, logger=logger, seed=0)
    fit.fit(
        Autoencoder(), DataLoader(images[:1400], batch_size=50, shuffle=True), DataLoader(images[1400:], batch_size=200)
    )

    events = EventAccumulator(logger.log_dir, {"images": 0}).Reload()
    written = events.Images("inputs, reconstructions")
    print(f"Images at steps {[image.step for image in written]}, each {written[-1].width} x {written[-1].height}")
    print(f"Validation loss: {fit.callback_metrics['val_loss']:.4f}, the images' variance is {images.var():.4f}")


if __name__ == "__main__":
    main()
