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
        for_generator, for_critic = self.optimizers()

        with self.toggled_optimizer(for_critic):
            real, fake = self.critic(images), self.critic(self(len(images)).detach())
            loss = says(real, 0.9) + says(fake, 0.0)
            for_critic.zero_grad()
            self.manual_backward(loss)
            for_critic.step()
        caught = ((real > 0).float().mean() + (fake < 0).float().mean()) / 2
        self.log_dict({"critic_loss": loss, "caught": caught}, on_step=False, on_epoch=True, prog_bar=True)

        with self.toggled_optimizer(for_generator):
            loss = says(self.critic(self(len(images))), 1.0)
            for_generator.zero_grad()
            self.manual_backward(loss)
            for_generator.step()
        self.log("generator_loss", loss, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        networks = (self.generator, self.critic)
        return [torch.optim.Adam(each.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999)) for each in networks]


def layers(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]


def says(logits: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def drawn(images: Tensor) -> str:
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
    fit.print(f"The mean image of 1000 drawn digits is {(real - fake).abs().mean():.3f} from the real one, in [0, 1].")
    fit.print(drawn(model(6).detach()))


if __name__ == "__main__":
    main()
