"""A small GAN on handwritten digits: two optimizers that step alternately, in manual optimization.

python examples/gan.py [--devices 2]
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Fit, TrainModule


class GAN(TrainModule):
    def __init__(self, noise: int = 16, width: int = 128, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False  # training_step calls backward and steps the optimizers itself
        self.generator = nn.Sequential(*layers(noise, width), *layers(width, width), nn.Linear(width, 64), nn.Sigmoid())
        self.critic = nn.Sequential(*layers(64, width), nn.Dropout(0.3), *layers(width, width), nn.Linear(width, 1))

    def forward(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.hparams.noise, device=self.device))

    def training_step(self, images: Tensor) -> None:
        generator_optimizer, critic_optimizer = self.optimizers()

        with self.toggled_optimizer(critic_optimizer):
            real, fake = self.critic(images), self.critic(self(len(images)).detach())
            loss = loss_against(real, 0.9) + loss_against(fake, 0.0)
            critic_optimizer.zero_grad()
            self.manual_backward(loss)
            critic_optimizer.step()
        critic_accuracy = ((real > 0).float().mean() + (fake < 0).float().mean()) / 2
        self.log_dict(
            {"critic_loss": loss, "critic_accuracy": critic_accuracy}, on_step=False, on_epoch=True, prog_bar=True
        )

        with self.toggled_optimizer(generator_optimizer):
            loss = loss_against(self.critic(self(len(images))), 1.0)
            generator_optimizer.zero_grad()
            self.manual_backward(loss)
            generator_optimizer.step()
        self.log("generator_loss", loss, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        networks = (self.generator, self.critic)
        return [
            torch.optim.Adam(network.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999), fused=True)
            for network in networks
        ]


def layers(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]


def loss_against(logits: Tensor, target: float) -> Tensor:
    """Return the mean loss if all images have the same target, from 0 (fake) to 1 (real)."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def as_text(images: Tensor) -> str:
    """Render images of shape (count, 64) side by side as text."""
    rows = (images.view(-1, 8, 8) * 4.99).int().transpose(0, 1).tolist()
    return "\n".join("   ".join("".join(" .+#@"[value] * 2 for value in line) for line in row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-epochs", type=int, default=60)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    options = parser.parse_args()

    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    fit = Fit(**vars(options), seed=0)
    torch.manual_seed(0)
    model = GAN()
    fit.fit(model, DataLoader(images, batch_size=64 // options.devices, shuffle=True, drop_last=True))
    real, fake = images.mean(0), model(1000).detach().mean(0)
    difference = (real - fake).abs().mean()
    fit.print(f"The mean of 1000 generated images differs by {difference:.3f} from that of the real ones, in [0, 1]")
    fit.print(as_text(model(6).detach()))


if __name__ == "__main__":
    main()
