"""Convert users' values to pixels, counts and rows, for drivetrain's loggers and for custom loggers."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from drivetrain.errors import ConfigurationError

_CHUNK = 1 << 22  # elements that are counted at once; the bin numbers of the elements take 8 bytes each


# Images


def pixels_of(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an image as a uint8 array of shape (H, W, C), where C is 1, 3 or 4.

    Args:
        value: a tensor of shape (C, H, W) or (H, W), an array of shape (H, W, C) or (H, W), or a Pillow image. Numbers
            of other dtypes than uint8 are clipped to the range from 0 to 1.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value if value.dtype == torch.uint8 else value.float()).numpy()
        array = np.moveaxis(value, 0, -1) if value.ndim == 3 else value
    else:
        mode = getattr(value, "mode", None)
        if mode is not None and mode not in ("L", "RGB", "RGBA"):
            value = value.convert("RGB")  # The numbers of other modes, such as palettes, are not intensities.
        array = np.asarray(value)
    if array.ndim == 2:
        array = array[..., None]
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    scaled = np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255
    return np.ascontiguousarray(np.rint(scaled).astype(np.uint8))


def png_of(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Encode the result of `pixels_of` as the content of a PNG file. Requires Pillow."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, format="PNG")
    return stream.getvalue()


def png_of_figure(figure: Any) -> bytes:
    """Return a figure as the content of a PNG file.

    Args:
        figure: a matplotlib figure, or another object with ``savefig(file, format="png")``.
    """
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def pixels_of_figure(figure: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a figure, in a form that `png_of_figure` accepts, as a uint8 array of shape (H, W, C). Requires Pillow."""
    from PIL import Image

    with Image.open(io.BytesIO(png_of_figure(figure))) as picture:
        return pixels_of(picture)


# Histograms


@dataclass(frozen=True)
class Histogram:
    """A histogram, counted like ``numpy.histogram``.

    Attributes:
        counts: the count of each bin.
        edges: the edges of the bins, one more than there are bins. Only the last bin includes its right edge.
        sum: the sum of the counted numbers.
        sum_of_squares: the sum of the squares of the counted numbers.
        left_out: how many numbers were not counted because they are infinite or NaN.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    sum: float
    sum_of_squares: float
    left_out: int = 0

    @property
    def total(self) -> int:
        """How many numbers were counted."""
        return sum(self.counts)

    @classmethod
    def of(cls, value: Any, bins: int = 64) -> Histogram:
        """Count the numbers of a tensor or array. A `Histogram` is returned unchanged.

        Args:
            value: a tensor or array of any shape, on any device.
            bins: the number of bins of equal width between the smallest and the largest finite number.

        Raises:
            ConfigurationError: the value is sharded over ranks.
        """
        if isinstance(value, Histogram):
            return value
        tensor = torch.as_tensor(value)
        if hasattr(tensor, "full_tensor"):
            raise ConfigurationError(
                "log_histogram got a tensor that is sharded over ranks.",
                "this rank holds only a part of the tensor, so the counts would not be those of the whole tensor.",
                "call trainer.log_histogram(name, tensor) on every rank.",
            )
        numbers = FlatValues(tensor)
        return numbers.counted(bin_edges(numbers.low, numbers.high, bins))

    @classmethod
    def joined(cls, parts: Sequence[Histogram]) -> Histogram:
        """Return the histogram of all parts, whose numbers were counted with the same edges."""
        return replace(
            parts[0],
            counts=tuple(map(sum, zip(*(part.counts for part in parts), strict=True))),
            sum=float(sum(part.sum for part in parts)),
            sum_of_squares=float(sum(part.sum_of_squares for part in parts)),
            left_out=sum(part.left_out for part in parts),
        )


Edges = np.ndarray[Any, Any]


def bin_edges(low: float, high: float, bins: int) -> Edges:
    """Return the edges of ``bins`` bins of equal width, in float64, like ``numpy.histogram_bin_edges``.

    NumPy raises an error if ``low`` and ``high`` are almost equal or too far apart. In the first case the edges are
    those of a slightly larger range.

    Args:
        low: the smallest number, or infinity if there are no numbers.
        high: the largest number.
        bins: the number of bins.
    """
    if low > high:
        low, high = 0.0, 1.0
    if low == high:
        low, high = low - 0.5, high + 0.5
    margin = bins * float(np.spacing(max(abs(low), abs(high))))
    if high - low < margin:
        low, high = low - margin, high + margin
    return 2 * np.linspace(low / 2, high / 2, bins + 1)  # half of the range cannot overflow


class FlatValues:
    """The finite numbers of a tensor, as a flat tensor on the same device.

    Args:
        tensor: a tensor of any shape; a complex tensor contributes its real and imaginary parts.

    Attributes:
        low: the smallest number; infinity if there are no numbers.
        high: the largest number; minus infinity if there are no numbers.
        left_out: how many numbers are infinite or NaN.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach()
        flat = flat if flat.layout is torch.strided else flat.to_dense()
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat.reshape(-1)
        is_float32 = flat.is_floating_point() and flat.element_size() <= 4
        flat = flat.to(torch.float32 if is_float32 else torch.float64)
        finite = flat.isfinite()
        self._flat = flat if bool(finite.all()) else flat[finite]
        self.left_out = flat.numel() - self._flat.numel()
        self.low, self.high = math.inf, -math.inf
        if self._flat.numel():
            self.low, self.high = map(float, self._flat.aminmax())

    def counted(self, edges: Edges) -> Histogram:
        """Return the histogram with these edges, which must be the same for all parts of a histogram."""
        flat = self._flat
        inner = torch.as_tensor(edges[1:-1].copy(), device=flat.device)
        counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device=flat.device)
        for part in torch.split(flat, _CHUNK):
            counts += torch.bincount(torch.bucketize(part.to(inner.dtype), inner, right=True), minlength=len(counts))
        return Histogram(
            tuple(counts.tolist()),
            tuple(edges.tolist()),
            float(flat.sum(dtype=torch.float64)),
            float(flat.double().square().sum()),
            self.left_out,
        )


# Tables


@dataclass(frozen=True)
class Table:
    """A table whose cells are numbers, booleans, None and text. `of` converts other values to text."""

    columns: list[str]
    rows: list[list[Any]]

    @classmethod
    def of(cls, value: Any) -> Table:
        """Make a table from a mapping of columns, a list of mappings (one per row), or a DataFrame.

        Raises:
            ValueError: the columns differ in length.
        """
        if isinstance(value, Table):
            return value
        if hasattr(value, "to_dict") and hasattr(value, "columns"):
            value = {str(name): list(value[name]) for name in value.columns}
        if isinstance(value, Mapping):
            rows = [list(map(_to_json_value, row)) for row in zip(*value.values(), strict=True)]
            return cls(list(map(str, value)), rows)
        names = list(dict.fromkeys(name for row in value for name in row))
        return cls(list(map(str, names)), [[_to_json_value(row.get(name)) for name in names] for row in value])

    def as_markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(_format_cell(cell) for cell in line) + " |" for line in lines)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _format_cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")
