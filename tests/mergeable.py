"""A metric with a state of its own kind that can be merged."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics


class MergeablePearson(torchmetrics.PearsonCorrCoef):
    """Adds ``merge_state`` to the torchmetrics class, whose states have no reduction."""

    def merge_state(self, incoming_state: Any) -> None:
        n, m = self.n_total, incoming_state["n_total"]
        x, y = incoming_state["mean_x"] - self.mean_x, incoming_state["mean_y"] - self.mean_y
        self.var_x = self.var_x + incoming_state["var_x"] + x**2 * n * m / (n + m)
        self.var_y = self.var_y + incoming_state["var_y"] + y**2 * n * m / (n + m)
        self.corr_xy = self.corr_xy + incoming_state["corr_xy"] + x * y * n * m / (n + m)
        self.mean_x, self.mean_y = self.mean_x + x * m / (n + m), self.mean_y + y * m / (n + m)
        for name in self._defaults.keys() & {"max_abs_dev_x", "max_abs_dev_y"}:  # absent from torchmetrics 1.6
            setattr(self, name, torch.maximum(getattr(self, name), incoming_state[name]))
        self.n_total = n + m
