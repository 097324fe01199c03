"""Code that users with a type checker write. `make types` checks this file strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, DataModule, Fit, RunContext, TrainModule

Pair = tuple[Tensor, Tensor]


class WithIndices(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        if self.trainer.is_global_zero:
            self.print(self.trainer.strategy.device)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Pair, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.net(batch[0]).mean())

    def test_step(self, batch: Pair, batch_idx: int, dataloader_idx: int) -> None: ...

    def predict_step(self, batch: Pair, batch_idx: int) -> Any:
        return super().predict_step(batch[0], batch_idx)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


class WithoutIndices(TrainModule):
    def training_step(self, texts: Tensor) -> dict[str, Tensor]:
        return {"loss": texts.mean()}

    def validation_step(self, batch: Mapping[str, Tensor]) -> None: ...

    def test_step(self, batch: Tensor, dataloader_idx: int) -> None: ...

    def predict_step(self, batch: Tensor) -> list[int]:
        return batch.argmax(-1).tolist()


class Watch(Callback):
    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        assert trainer.global_step > batch_idx
        trainer.log_metrics({"margin": trainer.callback_metrics["loss"].item() - batch_idx})
        trainer.should_stop = trainer.current_epoch == 2

    def on_fit_end(self, trainer: RunContext, module: Any) -> None:
        assert isinstance(trainer, Fit)  # for hooks that need all of it
        assert trainer.checkpoint_callback is not None
        trainer.save_checkpoint(trainer.checkpoint_callback.best_model_path)


class WatchWithIndices(Callback):
    def on_train_start(self, trainer: RunContext, module: WithIndices) -> None:
        assert module.net.in_features == 4

    def on_before_optimizer_step(self, trainer: RunContext, module: WithIndices, optimizer: Optimizer) -> None: ...


class Numbers(DataModule):
    def __init__(self, data: TensorDataset) -> None:
        super().__init__()
        self.data = data

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.data, batch_size=8)


def fit(data: TensorDataset) -> float:
    trainer = Fit(strategy="ddp", devices=2, max_epochs=1, callbacks=[Watch(), WatchWithIndices()])
    trainer.fit(WithIndices(), DataLoader(data), ckpt_path="auto")
    trainer.fit(WithoutIndices(), datamodule=Numbers(data))
    strategy: str = "a name of somebody else's"
    Fit(strategy=strategy, precision=32, logger=False)
    return trainer.callback_metrics["loss"].item()
