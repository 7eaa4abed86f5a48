"""A line drawn with braille dots: two columns and four rows of points per character cell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.style import Style
from rich.text import Text

# Bit of each dot in a braille cell, by [row][column].
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LOW, _HIGH = (242, 130, 72), (72, 201, 132)

Point = tuple[float, float]


def smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average, corrected for its start."""
    out: list[float] = []
    mean = norm = 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(mean / norm)
    return out


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """0..1 where all values fit, else their own range with a little air."""
    if not values or (min(values) >= 0 and max(values) <= 1):
        return 0.0, 1.0
    low, high = min(values), max(values)
    air = 0.05 * (high - low) or 1.0
    return low - air, high + air


def braille_curve(points: Sequence[Point], width: int, height: int, x_range: Point, y_range: Point) -> list[Text]:
    """`height` lines of `width` cells: the points faint, their moving average as a line coloured by its height."""
    line = [[0] * width for _ in range(height)]
    dots = [[0] * width for _ in range(height)]

    def place(layer: list[list[int]], x: float, y: float) -> None:
        column = round((x - x_range[0]) / (x_range[1] - x_range[0]) * (width * 2 - 1))
        row = round((y_range[1] - y) / (y_range[1] - y_range[0]) * (height * 4 - 1))
        if 0 <= column < width * 2 and 0 <= row < height * 4:
            layer[row // 4][column // 2] |= _BITS[row % 4][column % 2]

    for x, y in points:
        place(dots, x, y)
    averaged = list(zip([x for x, _ in points], smooth([y for _, y in points]), strict=True))
    for (x0, y0), (x1, y1) in pairwise(averaged):
        pieces = max(
            2,
            int(abs(x1 - x0) / (x_range[1] - x_range[0]) * width * 4),
            int(abs(y1 - y0) / (y_range[1] - y_range[0]) * height * 8),
        )
        for i in range(pieces + 1):
            place(line, x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces)

    rows: list[Text] = []
    for index in range(height):
        share = 1 - index / max(1, height - 1)
        red, green, blue = (round(a + (b - a) * share) for a, b in zip(_LOW, _HIGH, strict=True))
        bright = Style(color=f"#{red:02x}{green:02x}{blue:02x}", bold=True)
        text = Text()
        for line_bits, dot_bits in zip(line[index], dots[index], strict=True):
            bits = line_bits or dot_bits
            text.append(chr(0x2800 + bits) if bits else " ", bright if line_bits else Style(dim=True))
        rows.append(text)
    return rows
