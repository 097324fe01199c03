"""CSVLogger: files, resumed runs, a store or disk that fails (J-13), and media, also of TensorBoardLogger (L-04)."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from services import file_size_limit, log_all_media, log_steps, read_table

from drivetrain import Logger
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.loggers import CSVLogger, Histogram, Table, TensorBoardLogger
from drivetrain.loggers.media import pixels_of
from drivetrain.testing import requires_package
from faulty_store import FaultyStore


def _rows(logger: CSVLogger) -> list[dict[str, str]]:
    with fsspec.open(f"{logger.log_dir}/metrics.csv", "r", newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_step_makes_one_row_unless_a_value_would_be_lost_and_no_file_comes_before_it(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="a")
    assert (logger.log_dir, logger.version) == (None, None)
    logger.rewind(3)
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []
    for metrics in ({"loss": 1.0}, {"lr": 0.5}, {"loss": 2.0}):
        logger.log_metrics(metrics, step=5)
    logger.save()
    assert [path.name for path in Path(str(logger.log_dir)).iterdir()] == ["metrics.csv"]
    assert read_table(logger.log_dir) == ["step,a-loss,a-lr", "5,1.0,0.5", "5,2.0,"]
    (Path(str(logger.log_dir)) / "metrics.csv").unlink()  # during the run: the table begins anew, with its header
    log_steps(logger, 6).save()
    assert read_table(logger.log_dir) == ["step,a-loss,a-lr", "6,3.0,"]


def test_rows_are_held_back_for_the_configured_number_of_steps(tmp_path: Path) -> None:
    logger = log_steps(CSVLogger(tmp_path, flush_logs_every_n_steps=3), 1, 2, 3)
    assert list(tmp_path.iterdir()) == []
    for step, written in ((4, 4), (5, 4)):
        assert len(_rows(log_steps(logger, step))) == written
    logger.finalize("success")
    assert len(_rows(logger)) == 5
    with pytest.raises(ConfigurationError, match="flush_logs_every_n_steps=0"):  # G-06
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)


def test_runs_get_versions_and_a_resumed_run_continues_in_its_own(tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path), CSVLogger(tmp_path)
    # Both were made before either had written: the number is claimed by the write.
    for logger in (first, second):
        log_steps(logger, 1).save()
    assert (first.version, second.version) == (0, 1)  # L-10
    resumed = log_steps(CSVLogger(tmp_path, version=0), 2, name="acc")
    resumed.finalize("success")
    assert resumed.log_dir == first.log_dir
    assert read_table(first.log_dir) == ["step,loss,acc", "1,0.5,", "2,,1.0"]
    log_steps(CSVLogger(tmp_path, name="", version="baseline"), 1).save()
    assert (tmp_path / "baseline" / "metrics.csv").exists()
    # Two runs could take one number at a URL: their names are a time and random letters.
    names = set()
    for _ in range(2):
        remote = log_steps(CSVLogger(f"memory://{tmp_path.name}"), 1)
        remote.save()
        names.add(str(remote.version))
    assert len(names) == 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[a-z]{6}", name) for name in names)


NAMES = ["a,b", 'say "loss"', "two\nlines", "carriage\rreturn", "both\r\n", " spaces ", "Größe", "'", "step"]


@pytest.fixture(params=["", "file://", "memory://"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}{tmp_path}"


def test_names_and_values_are_read_back_unchanged(root: str) -> None:
    third: Any = np.float64(1 / 3)  # a number of another package, as are tensors
    values = [math.inf, -math.inf, 5e-324, 1e308, -0.0, third, 2**70, True, math.nan]
    for step in range(2):  # the second object reads what the first has written
        logger = CSVLogger(root, version=0)
        logger.log_metrics(dict(zip(NAMES, values, strict=True)), step)
        logger.save()
    log_steps(logger, 2, name="new").save()  # and the table is written anew
    logger.log_hyperparams({"lr": 0.1, "layers": [1, 2], "path": Path("x")})
    written = json.loads(fsspec.open(f"{logger.log_dir}/hparams.json").open().read())
    assert written == {"lr": 0.1, "layers": [1, 2], "path": "x"}
    rows = _rows(logger)
    assert list(rows[0]) == ["step", *NAMES[:-1], "step.1", "new"]
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    for row in rows[:2]:
        assert [float(row[name]) for name in NAMES[:-1]] == values[:-1]
        assert (row["'"], row["step.1"], row["carriage\rreturn"]) == ("1", "nan", "1e+308")


@pytest.mark.parametrize(
    "tail", ["3,3.", '3,"3.\n', '3,"a ""quoted"" word\nand a second', '3,"\n\n\n', "3,\xff", "\0\0\0"]
)
def test_a_truncated_row_is_dropped(tmp_path: Path, tail: str) -> None:
    logger = log_steps(CSVLogger(tmp_path, version=0), 0, 1, 2, name="two\nlines")
    logger.save()
    path = Path(str(logger.log_dir)) / "metrics.csv"
    path.write_bytes(path.read_bytes() + tail.encode("latin-1"))
    resumed = log_steps(CSVLogger(tmp_path, version=0), 3, name="two\nlines")
    resumed.save()
    assert _rows(resumed) == [{"step": f"{step}", "two\nlines": f"{step / 2}"} for step in range(4)]


@pytest.mark.parametrize("length", [0, 4, 5, 6, 10, 16])
def test_a_truncated_header_is_written_anew(tmp_path: Path, length: int) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "metrics.csv").write_text('step,"two\nlines"\n'[:length])
    log_steps(CSVLogger(tmp_path, name="", version="v"), 1, name="two\nlines").save()
    assert (tmp_path / "v" / "metrics.csv").read_text() == 'step,"two\nlines"\n1,0.5\n'


def test_what_others_have_written_is_kept(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    path = tmp_path / "v" / "metrics.csv"
    path.write_bytes(b"step,lr,empty,note\n1,,,caf\xe9\n2,0.5,,\n")
    log_steps(CSVLogger(tmp_path, name="", version="v"), 3).save()
    assert path.read_bytes() == b"step,lr,empty,note,loss\n1,,,caf\xe9,\n2,0.5,,,\n3,,,,1.5\n"
    path.write_bytes(b"\xef\xbb\xbfstep,loss\r\n10.0,1\r\nnote,2\r\n,3\r\nnan,4\r\n30.0,5\r\n")  # a spreadsheet's
    CSVLogger(tmp_path, name="", version="v").rewind(20)
    assert read_table(tmp_path / "v") == ["step,loss", "10.0,1", "note,2", ",3", "nan,4"]


def test_a_rewind_removes_rows_and_columns_of_later_steps_up_to_all(root: str) -> None:  # J-13
    first = log_steps(CSVLogger(root, version=0), 10, 20, 30)
    log_steps(first, 30, name="late").save()
    again = CSVLogger(root, version=0)
    again.rewind(20)
    assert read_table(again.log_dir) == ["step,loss", "10,5.0", "20,10.0"]
    log_steps(again, 30)
    log_steps(again, 40, name="late").save()
    table = ["step,loss,late", "10,5.0,", "20,10.0,", "30,15.0,", "40,,20.0"]
    assert read_table(again.log_dir) == table
    log_steps(again, 50, 60).rewind(50)  # rows that are not yet written
    again.finalize("success")
    assert read_table(again.log_dir) == [*table, "50,25.0,"]
    new = log_steps(CSVLogger(root, version=1), 1, 2, 3)
    new.rewind(1)
    log_steps(new, 2).finalize("success")
    assert read_table(new.log_dir) == ["step,loss", "1,0.5", "2,1.0"]
    beginnings: list[tuple[int, list[str]]] = [(0, ["0,0.0"]), (-1, [])]
    for version, (step, kept) in enumerate(beginnings, 2):
        log_steps(CSVLogger(root, version=version), 0, 1, 2).save()
        again = CSVLogger(root, version=version)
        again.rewind(step)
        assert read_table(again.log_dir)[1:] == kept
        log_steps(again, 1).save()
        assert read_table(again.log_dir) == ["step,loss", *kept, "1,0.5"]


def test_a_rewind_that_fails_leaves_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # J-13
    log_steps(CSVLogger(tmp_path, name="", version="v"), 1, 2, 3).save()
    before = read_table(tmp_path / "v")
    logger = CSVLogger(tmp_path, name="", version="v")

    def refuse(source: str, target: str) -> None:
        raise PermissionError(target)

    with monkeypatch.context() as patches:
        patches.setattr("os.replace", refuse)
        with pytest.raises(DrivetrainError, match=r"metrics\.csv below .* cannot be written: PermissionError"):
            logger.rewind(1)
    assert read_table(tmp_path / "v") == before
    logger.rewind(1)
    assert read_table(tmp_path / "v") == before[:2]
    assert [path.name for path in (tmp_path / "v").iterdir()] == ["metrics.csv"]


def logger_at_the_store(flush_every: int = 100) -> CSVLogger:
    return CSVLogger("faulty://store/logs", name="", version=0, flush_logs_every_n_steps=flush_every)


def steps_in(store: FaultyStore) -> list[int]:
    header, *rows = read_table(store.folder / "logs/version_0")
    assert header.startswith("step")
    return [int(row.split(",")[0]) for row in rows]


@pytest.mark.parametrize("operation", ["size", "get", "list", "put", "remove", "*"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_store_that_refuses_for_a_moment_loses_no_row(store: FaultyStore, operation: str, lost: bool) -> None:  # J-13
    log_steps(logger_at_the_store(), 1, 2).save()
    store.fail(operation, lost=lost, times=2)
    logger = log_steps(logger_at_the_store(), 3)
    logger.save()
    log_steps(logger, 4).save()
    assert steps_in(store) == [1, 2, 3, 4]


def test_a_table_that_cannot_be_read_is_not_replaced_and_a_missing_right_is_no_fault(store: Any) -> None:  # J-13
    log_steps(logger_at_the_store(), 1, 2).save()
    for operation in ("size", "get", "list"):
        store.fail(operation, times=None)
    logger = log_steps(logger_at_the_store(), 3)
    with pytest.raises(DrivetrainError, match=r"metrics\.csv below 'faulty.*503 Slow Down"):
        logger.save()
    assert steps_in(store) == [1, 2]
    store.heal()
    logger.save()
    assert steps_in(store) == [1, 2, 3]
    store.fail("put", error=PermissionError("no right"), times=None)
    before = len(store.calls)
    with pytest.raises(DrivetrainError, match="no right"):
        log_steps(logger_at_the_store(), 4).save()
    assert [operation for operation, _ in store.calls[before:]].count("put") == 1  # it is not tried again


@pytest.mark.parametrize("lost", [False, True])
def test_rows_that_could_not_be_written_are_written_with_the_next(store: Any, lost: bool, caplog: Any) -> None:  # J-13
    logger = log_steps(logger_at_the_store(flush_every=1), 1, 2)
    store.fail("put", lost=lost, times=None)
    before = len(store.calls)
    log_steps(logger, 3, 4, 5)  # the run continues
    # After a failure, writes are not retried. (A put whose answer was lost is repeated.)
    assert [operation for operation, _ in store.calls[before:]].count("put") == (3 + 1 + 1) * (1 + lost)
    assert caplog.text.count("The run continues") == 1
    assert "503 Slow Down" in caplog.text
    with pytest.raises(DrivetrainError, match="503 Slow Down"):
        logger.finalize("success")
    store.heal()
    log_steps(logger, 6).finalize("success")
    assert steps_in(store) == [1, 2, 3, 4, 5, 6]
    store.fail("put", lost=lost, times=None)
    log_steps(logger, 7, 8)
    store.heal()
    logger.rewind(6)  # also rows whose confirmation was lost
    assert steps_in(store) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_rewind_is_retried_before_it_fails(store: FaultyStore, operation: str, lost: bool) -> None:  # J-13
    logger_at_the_store().rewind(4)
    assert store.objects() == []
    log_steps(logger_at_the_store(), *range(1, 7)).save()
    store.fail(operation, lost=lost, times=2)
    logger_at_the_store().rewind(4)
    assert steps_in(store) == [1, 2, 3, 4]
    store.fail(operation, times=None)
    logger = logger_at_the_store()
    with pytest.raises(DrivetrainError, match="503 Slow Down"):
        logger.rewind(2)
    assert steps_in(store) == [1, 2, 3, 4]
    store.heal()
    logger.rewind(2)
    log_steps(logger, 3).save()
    assert steps_in(store) == [1, 2, 3]


def test_the_table_is_whole_at_every_moment(store: FaultyStore) -> None:  # J-13
    logger = log_steps(logger_at_the_store(), 1, 2)
    logger.save()
    seen: list[list[int]] = []
    store.fail("*", error=None, times=None, call=lambda: seen.append(steps_in(store)))
    log_steps(logger, 3).save()
    logger.rewind(1)
    store.heal()
    assert {len(rows) for rows in seen} <= {1, 2, 3}
    assert steps_in(store) == [1]
    assert store.objects() == ["logs/version_0/metrics.csv"]


@pytest.mark.parametrize("column", ["loss", "new"])
def test_a_full_disk_keeps_whole_rows_and_gets_others_later(tmp_path: Path, caplog: Any, column: str) -> None:  # J-13
    logger = log_steps(CSVLogger(tmp_path, name="", version="v", flush_logs_every_n_steps=3), *range(4))
    path = tmp_path / "v" / "metrics.csv"
    before = path.read_text()
    with file_size_limit(len(before) + 10):
        log_steps(logger, 4, 5)
        log_steps(logger, 6, name=column)
        with pytest.raises(DrivetrainError, match="File too large"):
            logger.save()
    assert caplog.text.count("The run continues") == 1
    assert path.read_text() == before
    assert [child.name for child in path.parent.iterdir()] == ["metrics.csv"]
    log_steps(logger, 7).finalize("success")
    assert [int(row.split(",")[0]) for row in read_table(path.parent)[1:]] == list(range(8))


@requires_package("PIL")
@pytest.mark.parametrize("url", [False, True])
def test_csv_logger_writes_files(tmp_path: Path, url: bool) -> None:  # L-04
    from PIL import Image

    logger = CSVLogger(tmp_path.as_uri() if url else tmp_path, version=0, prefix="a")
    assert not list(tmp_path.iterdir())
    log_all_media(logger)
    media = tmp_path / "drivetrain_logs/version_0/media"
    picture = Image.open(media / "a-seen/picture/step=2.png")
    assert (picture.size, picture.getpixel((0, 0))) == ((6, 4), (128, 128, 128))
    assert Image.open(media / "a-figure/step=2.png").getpixel((0, 0)) == (255, 0, 0)
    assert sum(json.loads((media / "a-weights/step=2.json").read_text())["counts"]) == 8
    assert (media / "a-text/step=2.txt").read_text() == "# Hello"
    assert list(csv.reader((media / "a-table/step=2.csv").open())) == [["x", "y"], ["1", "a|b"], ["2", ""]]


def test_csv_logger_writes_only_to_its_folder_and_a_rewind_removes_later_media(tmp_path: Path) -> None:  # L-04
    logger = CSVLogger(tmp_path / "logs", version=0)
    for key in ("../../out", "/abs", "a//b", "", "nul\0byte", "a:b*c"):
        logger.log_text(key, "x", 0)
    media = tmp_path / "logs/drivetrain_logs/version_0/media"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 6
    assert all(media in path.parents for path in files)
    for step in (9, 10, 100):
        logger.log_text("text", str(step), step)
    logger.rewind(10)
    assert sorted(path.name for path in (media / "text").iterdir()) == ["step=10.txt", "step=9.txt"]


@requires_package("tensorboard")
def test_tensorboard_logger_writes_events(tmp_path: Path) -> None:  # L-04
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, version=0, prefix="a")
    log_all_media(logger)
    logger.finalize("success")
    events = EventAccumulator(str(logger.log_dir), size_guidance={"tensors": 0, "histograms": 0}).Reload()
    images = [events.Images(name)[0] for name in ("a-seen/picture", "a-figure")]
    assert [(one.step, one.width, one.height) for one in images] == [(2, 6, 4), (2, 5, 3)]
    (weights,) = events.Histograms("a-weights")
    written = weights.histogram_value
    assert (weights.step, written.num, written.sum, written.sum_squares) == (2, 8.0, 28.0, 140.0)
    counts, edges = np.histogram(np.arange(8.0, dtype=np.float32), 64)
    assert (list(written.bucket), list(written.bucket_limit)) == (counts.tolist(), edges[1:].tolist())
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val for tag in events.Tags()["tensors"]}
    assert texts == {
        "a-text/text_summary": [b"# Hello"],
        "a-table/text_summary": [b"| x | y |\n| --- | --- |\n| 1 | a\\|b |\n| 2 |  |"],
    }


class MetricsLogger(Logger):
    """Has only the methods that a logger must have."""

    name, version = "numbers", "0"

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        pass


def test_media_that_a_logger_does_not_support_are_named_once(caplog: pytest.LogCaptureFixture) -> None:  # L-04
    logger = MetricsLogger()
    log_all_media(logger)
    log_all_media(logger, 4)
    log_all_media(MetricsLogger())
    kinds = ("images", "figures", "histograms", "texts", "tables")
    expected = [f"MetricsLogger cannot log {kind}, so they are ignored." for kind in kinds] * 2
    assert [record.getMessage() for record in caplog.records] == expected
    assert logger.experiment is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("bins", [1, 7])
def test_a_histogram_is_numpys(dtype: torch.dtype, bins: int) -> None:  # L-04
    value = (torch.randn(37, 11, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    exact = value.double()
    counts, edges = np.histogram(exact.numpy(), bins)
    found = Histogram.of(value, bins)
    assert found.counts == tuple(counts.tolist())
    assert found.edges == tuple(edges.tolist())
    assert found.total == value.numel()
    assert found.sum == pytest.approx(exact.sum().item(), abs=1e-9)


def test_histograms_of_special_tensors() -> None:  # L-04
    found = Histogram.of(torch.tensor([1.0, math.nan, math.inf, 2.0, -math.inf, math.nan]), 2)
    assert (found.counts, found.edges, found.left_out) == ((1, 1), (1.0, 1.5, 2.0), 4)
    assert Histogram.of(found) is found
    assert Histogram.of(torch.tensor([]), 2).edges == (0.0, 0.5, 1.0)
    assert Histogram.of([3, 3, 3], 2).counts == (0, 3)
    assert Histogram.of(torch.tensor([3 + 4j]), 1).total == 2
    gradient = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert Histogram.of(gradient.to_sparse(), 2) == Histogram.of(gradient, 2)


@pytest.mark.parametrize(
    "values",
    [
        np.asarray([1.0, 1.0 + 2**-23] * 3, np.float32),  # a norm's weight after a step of the warm-up
        np.asarray([-1e9] * 3, np.float32),  # a mask
        np.asarray([-1e38, 3e38, 0], np.float32),
        np.asarray([1e-45, 3e-45], np.float32),
        np.asarray([-1.7e308, 0.0, 1.7e308]),
        np.asarray([1e300] * 2),
    ],
)
@pytest.mark.parametrize("bins", [1, 64])
def test_a_histogram_of_a_range_that_numpy_refuses(values: np.ndarray[Any, Any], bins: int) -> None:
    # L-04: between these numbers there are no 64 others of their type, or more than it holds
    found = Histogram.of(torch.from_numpy(values), bins)
    edges = np.asarray(found.edges)
    assert np.isfinite(edges).all()
    assert (np.diff(edges / 2) > 0).all()
    assert (edges[0] <= values.min(), values.max() <= edges[-1]) == (True, True)
    assert found.counts == tuple(np.histogram(values.astype(np.float64), edges)[0].tolist())


@requires_package("PIL")
def test_images_of_every_kind_become_pixels() -> None:
    from PIL import Image

    assert pixels_of(torch.tensor([[0.0, 1.0, 2.0, float("nan")]])).tolist() == [[[0], [255], [255], [0]]]
    assert pixels_of(np.full((2, 3, 4), 7, np.uint8)).shape == (2, 3, 4)
    assert pixels_of(torch.full((4, 2, 3), 7, dtype=torch.uint8)).shape == (2, 3, 4)
    assert pixels_of(torch.rand(1, 2, 3, dtype=torch.bfloat16, requires_grad=True)).shape == (2, 3, 1)
    palette = Image.new("RGB", (3, 2), (9, 8, 7)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert pixels_of(palette)[0, 0].tolist() == [9, 8, 7]


class Frame:
    """The part of a DataFrame that is used."""

    columns = ("x", 2)

    def to_dict(self) -> dict[str, Any]:
        return {}

    def __getitem__(self, name: Any) -> list[int]:
        return [1, 3] if name == "x" else [2, 4]


def test_tables_of_every_kind() -> None:
    assert Table.of(Frame()) == Table(["x", "2"], [[1, 2], [3, 4]])
    assert Table.of({"x": np.array([1.5]), "y": [Path("a")]}) == Table(["x", "y"], [[1.5, "a"]])
    assert Table.of([]) == Table([], [])
