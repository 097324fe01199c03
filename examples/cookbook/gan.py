"""GAN: two networks with opposite objectives, each with its own optimizer, that are trained alternately.

Common mistake: returning both optimizers and one loss. In automatic optimization all optimizers use the gradients of
the same loss, which suits Muon and AdamW together, but here both networks would minimize the same objective. Use manual
optimization. Toggle the optimizers, so that the generator's loss leaves no gradients in the critic, and detach the
generated images in the critic's loss.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Fit, TrainModule, seed_everything


def network(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    hidden = nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class GAN(TrainModule):
    automatic_optimization = False  # training_step calls backward and steps the optimizers itself

    def __init__(self):
        super().__init__()
        self.generator, self.critic = network(8, 2), network(2, 1)

    def forward(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, 8, device=self.device))

    def training_step(self, real: Tensor) -> None:
        generator_optimizer, critic_optimizer = self.optimizers()
        fake = self(len(real))
        with self.toggled_optimizer(critic_optimizer):
            loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
            self.step(critic_optimizer, loss)
        with self.toggled_optimizer(generator_optimizer):
            self.step(generator_optimizer, F.softplus(-self.critic(self(len(real)))).mean())

    def step(self, optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.Adam(net.parameters(), 2e-3, (0.5, 0.99), fused=True) for net in (self.generator, self.critic)
        ]


def main() -> None:
    seed_everything(0)
    angle = torch.rand(8192) * 2 * torch.pi
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    gan = GAN()
    fit = Fit(max_epochs=20, seed=0)
    fit.fit(gan, DataLoader(circle, batch_size=256, shuffle=True, drop_last=True))

    points = gan(2000).detach()
    distance = (points.norm(dim=1) - 1).abs().mean()
    octants = torch.atan2(points[:, 1], points[:, 0]).div(torch.pi / 4).floor().unique()
    print(f"Generated points lie {distance:.3f} from the circle, in {len(octants)} of its 8 parts")


if __name__ == "__main__":
    main()
