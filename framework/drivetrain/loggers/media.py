"""What loggers make of the values that users give them: pixels, counts, rows. For authors of loggers too."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from drivetrain.errors import ConfigurationError

_AT_ONCE = 1 << 22  # elements that are counted at once: finding their bins takes 8 bytes for each


# Pictures


def pixels_of(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a picture as an array of bytes of shape (H, W, C); C is 1, 3 or 4.

    Args:
        value: a tensor of shape (C, H, W) or (H, W), an array of shape (H, W, C) or (H, W), or a picture of Pillow's.
            Numbers that are no bytes (uint8) are from 0 to 1; what is outside is cut off.

    Raises:
        ConfigurationError: it is none of these.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value if value.dtype == torch.uint8 else value.float()).numpy()
        array = np.moveaxis(value, 0, -1) if value.ndim == 3 else value
    else:
        mode = getattr(value, "mode", None)
        if mode is not None and mode not in ("L", "RGB", "RGBA"):
            value = value.convert("RGB")  # a palette's numbers, say, are no brightness
        array = np.asarray(value)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or array.dtype.kind not in "fiub":
        raise ConfigurationError(
            f"log_image was given a {type(value).__name__} of shape {tuple(array.shape)} and dtype {array.dtype}.",
            "a picture has one, three or four channels of numbers.",
            "give a tensor of shape (C, H, W) or (H, W), an array of shape (H, W, C) or (H, W), or a Pillow image; for "
            "several, call it for each, or make a grid of them.",
        )
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    scaled = np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255
    return np.ascontiguousarray(np.rint(scaled).astype(np.uint8))


def png_of(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Return what `pixels_of` gave as the content of a PNG file. Needs Pillow."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, format="PNG")
    return stream.getvalue()


def png_of_figure(figure: Any) -> bytes:
    """Return a figure as the content of a PNG file.

    Args:
        figure: of matplotlib's, or whatever has a ``savefig(file, format="png")``.

    Raises:
        ConfigurationError: it has none.
    """
    if not callable(getattr(figure, "savefig", None)):
        raise ConfigurationError(
            f"log_figure was given a {type(figure).__name__}.",
            "figures are drawn by their savefig(file, format='png'), which it does not have.",
            "give a figure of matplotlib's; log_image takes pixels.",
        )
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def pixels_of_figure(figure: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a figure, as for `png_of_figure`, as an array of bytes of shape (H, W, C). Needs Pillow."""
    from PIL import Image

    with Image.open(io.BytesIO(png_of_figure(figure))) as picture:
        return pixels_of(picture)


# Histograms


@dataclass(frozen=True)
class Histogram:
    """How numbers are distributed: as ``numpy.histogram`` counts them.

    Attributes:
        counts: in each bin.
        edges: of the bins, one more than there are bins; the last bin includes its right edge.
        sum: of the numbers that are counted.
        sum_of_squares: likewise.
        left_out: how many were infinite or NaN, and are not counted.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    sum: float
    sum_of_squares: float
    left_out: int = 0

    @property
    def total(self) -> int:
        """How many numbers are counted."""
        return sum(self.counts)

    def with_at_most(self, bins: int) -> Histogram:
        """Return it with neighbouring bins joined, where it has more than ``bins``."""
        width = -(-len(self.counts) // bins)
        if width <= 1:
            return self
        counts = tuple(sum(self.counts[at : at + width]) for at in range(0, len(self.counts), width))
        return replace(self, counts=counts, edges=(*self.edges[:-1:width], self.edges[-1]))

    @classmethod
    def of(cls, value: Any, bins: int = 64) -> Histogram:
        """Count a tensor's or an array's numbers; a `Histogram` is returned as it is.

        Args:
            value: of any shape, on any device. One that is spread over ranks is refused.
            bins: of equal width, between the smallest and the largest finite number.

        Raises:
            ConfigurationError: it has no numbers, or is spread over ranks.
        """
        if isinstance(value, Histogram):
            return value
        tensor = _as_tensor(value)
        if hasattr(tensor, "full_tensor"):
            raise ConfigurationError(
                "log_histogram was given a tensor that is spread over ranks.",
                "this rank holds a part of it, and its counts are not those of the whole.",
                "call trainer.log_histogram(name, tensor) on every rank.",
            )
        numbers = FlatValues(tensor)
        return cls.joined([numbers.counted(edges := numbers.reach.edges(bins))], edges, numbers.reach.left_out)

    @classmethod
    def joined(cls, parts: Sequence[BinCounts], edges: Edges, left_out: int) -> Histogram:
        """Return the histogram of numbers whose parts were counted between the same edges."""
        return cls(
            tuple(map(sum, zip(*(part.counts for part in parts), strict=True))),
            tuple(map(float, edges.tolist())),
            float(sum(part.sum for part in parts)),
            float(sum(part.sum_of_squares for part in parts)),
            left_out,
        )


Edges = np.ndarray[Any, Any]


def _as_tensor(value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"log_histogram was given a {type(value).__name__}.",
            f"it counts the numbers of one tensor or array ({error}).",
            "give a tensor, an array, or a Histogram; trainer.log_histogram takes a dict of tensors by name.",
        ) from error


@dataclass(frozen=True)
class ValueRange:
    """Between which numbers the finite ones of a tensor are, or those of several."""

    low: float
    high: float
    left_out: int
    single: bool
    """Whether they are of float32 at most, as which their edges are computed then."""

    @property
    def is_empty(self) -> bool:
        """True where no number is finite."""
        return self.low > self.high

    def edges(self, bins: int) -> Edges:
        """Return the edges of ``bins`` bins, which are those that ``numpy.histogram`` takes.

        Where it takes none, they are of float64, or reach a little further: so many bins do not fit between numbers
        that are all but equal, as the weights of a norm are at first, and the width of others is no float32.
        """
        for dtype in (np.float32, np.float64) if self.single else (np.float64,):
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    edges = np.histogram_bin_edges(
                        np.asarray([] if self.is_empty else [self.low, self.high], dtype), bins
                    )
            except ValueError:
                if bins < 1:
                    raise
                continue
            if np.isfinite(edges).all() and (np.diff(edges / 2) > 0).all():
                return edges
        margin = bins * np.spacing(max(abs(self.low), abs(self.high)))
        return 2 * np.linspace((self.low - margin) / 2, (self.high + margin) / 2, bins + 1)

    @classmethod
    def joined(cls, parts: Sequence[ValueRange]) -> ValueRange:
        """Return the reach of all parts together."""
        return cls(
            min(part.low for part in parts),
            max(part.high for part in parts),
            sum(part.left_out for part in parts),
            all(part.single for part in parts),
        )


EMPTY_RANGE = ValueRange(float("inf"), float("-inf"), 0, True)
"""The reach of no numbers at all."""


@dataclass(frozen=True)
class BinCounts:
    """What a part of the numbers comes to."""

    counts: list[int]
    sum: float
    sum_of_squares: float


class FlatValues:
    """The numbers of a tensor, on its device, about to be counted.

    Args:
        tensor: of any shape; a complex one counts as its real and its imaginary parts.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach()
        flat = flat if flat.layout is torch.strided else flat.to_dense()
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat.reshape(-1)
        single = flat.is_floating_point() and flat.element_size() <= 4
        flat = flat.to(torch.float32 if single else torch.float64)
        finite = flat.isfinite()
        self._flat = flat if bool(finite.all()) else flat[finite]
        left_out = flat.numel() - self._flat.numel()
        low, high = (
            (float(end) for end in self._flat.aminmax()) if self._flat.numel() else (EMPTY_RANGE.low, EMPTY_RANGE.high)
        )
        self.reach = ValueRange(low, high, left_out, single)

    def counted(self, edges: Edges) -> BinCounts:
        """Count them between edges, which are alike for all parts."""
        flat = self._flat
        inner = torch.as_tensor(edges[1:-1].copy(), device=flat.device)
        counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device=flat.device)
        for part in torch.split(flat, _AT_ONCE):
            counts += torch.bincount(torch.bucketize(part.to(inner.dtype), inner, right=True), minlength=len(counts))
        return BinCounts(counts.tolist(), float(flat.sum(dtype=torch.float64)), float(flat.double().square().sum()))


# Texts


def text_of(value: Any) -> str:
    """Return a text that a file can hold: what UTF-8 cannot hold, halves of a surrogate pair, as ``\\udcff``."""
    return str(value).encode(errors="backslashreplace").decode()


# Tables


@dataclass(frozen=True)
class Table:
    """A table of plain values: what JSON knows, and the text of everything else."""

    columns: list[str]
    rows: list[list[Any]]

    @classmethod
    def of(cls, value: Any) -> Table:
        """Take a table from columns by name, from rows by column (a list of mappings), or from a DataFrame.

        Raises:
            ConfigurationError: it is none of these, or its columns differ in length.
        """
        if isinstance(value, Table):
            return value
        if hasattr(value, "to_dict") and hasattr(value, "columns"):
            value = {str(name): list(value[name]) for name in value.columns}
        if isinstance(value, Mapping) and all(_is_list(column) for column in value.values()):
            lengths = {len(column) for column in value.values()}
            if len(lengths) <= 1:
                rows = [list(map(_plain, row)) for row in zip(*value.values(), strict=True)]
                return cls(list(map(str, value)), rows)
        elif _is_list(value) and all(isinstance(row, Mapping) for row in value):
            names = list(dict.fromkeys(name for row in value for name in row))
            return cls(list(map(str, names)), [[_plain(row.get(name)) for name in names] for row in value])
        raise ConfigurationError(
            f"log_table was given {_described(value)}.",
            "a table has columns of one length, each with a name.",
            "give {'column': [values], ...}, a list of {'column': value, ...}, or a DataFrame.",
        )

    def as_markdown(self) -> str:
        """Return it as a table in Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(_cell(one) for one in line) + " |" for line in lines)


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__iter__") and not isinstance(value, str | bytes | Mapping)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    return value if value is None or isinstance(value, bool | int | float) else text_of(value)


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return "columns of the lengths " + str([len(one) if _is_list(one) else None for one in value.values()])
    return f"a {type(value).__name__}"
