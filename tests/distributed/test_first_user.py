"""What a new user forgets."""

from __future__ import annotations

import pytest
from small_runs import Regression, data, loader, quiet

from drivetrain import ConfigurationError, TrainModule


def test_a_module_without_optimizers_is_refused() -> None:  # G-06
    lacking = type("Lacking", (Regression,), {"configure_optimizers": TrainModule.configure_optimizers})
    with pytest.raises(ConfigurationError, match="Lacking has no configure_optimizers"):
        quiet().fit(lacking(), loader(8, 4))


@pytest.mark.parametrize("loaders", [[data(8)], {"a": data(8)}], ids=["list", "dict"])
def test_a_data_set_in_place_of_a_loader_is_refused(loaders: object) -> None:
    with pytest.raises(ConfigurationError, match="TensorDataset, which is a data set"):
        quiet().fit(Regression(), loaders)


def test_a_validation_loader_without_a_validation_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    quiet().fit(Regression(), loader(8, 4), loader(8, 4))
    assert "Regression has no validation_step: nothing is validated" in caplog.text
