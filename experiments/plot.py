# SPDX-License-Identifier: MIT
"""Line plots, scatter plots and heat maps as SVG text."""

from __future__ import annotations

import base64
import math
from typing import NamedTuple
from xml.sax.saxutils import escape

COLOURS = ["#1b1b1b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 30, 44
CELL_WIDTH, CELL_HEIGHT = 58, 26  # of heat maps


class Curve(NamedTuple):
    """Points of one line; curves with equal names have equal colours and one entry in the legend."""

    name: str
    points: list[tuple[float, float]]


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers from low to high."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Frame:
    """The axes of a plot: x from 0, y with a margin."""

    def __init__(self, width: int, height: int, x_high: float, y_range: tuple[float, float]) -> None:
        self.width, self.height, self.x_high = width, height, x_high
        low, high = y_range
        margin = 0.03 * (high - low) or 0.1  # one point
        self.low, self.high = low - margin, high + margin

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is; one above or below is at the edge."""
        across = LEFT + x / self.x_high * (self.width - LEFT - RIGHT)
        inside = self.height - TOP - BOTTOM
        down = TOP + (self.high - min(max(y, self.low), self.high)) / (self.high - self.low) * inside
        return round(across, 1), round(down, 1)

    def parts(self, title: str, x_label: str, y_label: str, below: int = 0) -> list[str]:
        """The beginning of an SVG picture, with room for a legend `below`."""
        right, height = self.width - RIGHT, self.height + below
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" '
            f'width="{self.width}" height="{height}" font-family="sans-serif" font-size="11">',
            f'<rect width="{self.width}" height="{height}" fill="white"/>',
            f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
        ]
        for tick in ticks(0.0, self.x_high):
            x, y = self.place(tick, self.low)
            parts.append(f'<text x="{x}" y="{y + 15}" text-anchor="middle">{tick:g}</text>')
        for tick in ticks(self.low, self.high):
            x, y = self.place(0.0, tick)
            parts.append(f'<path d="M{x} {y}H{right}" stroke="#dddddd"/>')
            parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
        parts.append(f'<text x="{(LEFT + right) / 2}" y="{self.height - 10}" text-anchor="middle">{escape(x_label)}</text>')
        centre = (TOP + self.height - BOTTOM) / 2
        parts.append(f'<text transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">'
                     f"{escape(y_label)}</text>")
        return parts


def line_plot(title: str, x_label: str, y_label: str, curves: list[Curve],
              y_range: tuple[float, float] | None = None) -> str:
    """An SVG picture. Points outside of y_range are cut off at its edge."""
    ys = [y for curve in curves for _, y in curve.points]
    frame = Frame(WIDTH, HEIGHT, max(x for curve in curves for x, _ in curve.points), y_range or (min(ys), max(ys)))
    names = list(dict.fromkeys(curve.name for curve in curves))
    parts = frame.parts(title, x_label, y_label, below=16 * len(names) + 8)
    for curve in curves:
        colour = COLOURS[names.index(curve.name) % len(COLOURS)]
        path = "L".join(f"{x} {y}" for x, y in (frame.place(*point) for point in curve.points))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
    for index, name in enumerate(names):
        y = HEIGHT + 16 * index + 4
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<path d="M{LEFT} {y}h22" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(f'<text x="{LEFT + 30}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class Mark(NamedTuple):
    """A point of a scatter plot: the middle of a range of y."""

    name: str
    x: float
    y: float
    low: float
    high: float


def scatter_plot(title: str, x_label: str, y_label: str, marks: list[Mark]) -> str:
    """An SVG picture with the name of every mark to its right, and its range as a line."""
    frame = Frame(640, 400, 1.25 * max(mark.x for mark in marks),
                  (min(mark.low for mark in marks), max(mark.high for mark in marks)))
    parts = frame.parts(title, x_label, y_label)
    for index, mark in enumerate(marks):
        colour = COLOURS[index % len(COLOURS)]
        x, y = frame.place(mark.x, mark.y)
        ends = [frame.place(mark.x, end)[1] for end in (mark.low, mark.high)]
        parts.append(f'<path d="M{x} {ends[0]}V{ends[1]}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 8}" y="{y + 4}">{escape(mark.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def picture(png: str) -> str:
    """A PNG file, given in base 64, as an SVG picture of its size."""
    head = base64.b64decode(png[:48])
    width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
            f'<image width="{width}" height="{height}" style="image-rendering:pixelated" '
            f'href="data:image/png;base64,{png}"/></svg>\n')


def shade(value: float) -> tuple[str, str]:
    """Colours of a cell and of the number in it, from white at 0 to dark blue at 1."""
    part = min(max(value, 0.0), 1.0)
    dark = (0, 70, 127)
    cell = "#" + "".join(f"{round(255 + part * (channel - 255)):02x}" for channel in dark)
    return cell, "white" if part > 0.55 else "#1b1b1b"


def heat_maps(title: str, row_label: str, rows: list[str], maps: dict[str, dict[str, list[float]]]) -> str:
    """One map beside the other: values from 0 to 1, by map and column, one per row."""
    widths = [LEFT + CELL_WIDTH * len(columns) + RIGHT for columns in maps.values()]
    width, height = sum(widths), TOP + 22 + CELL_HEIGHT * len(rows) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    left = 0
    for (name, columns), own_width in zip(maps.items(), widths):
        parts.append(f'<text x="{left + LEFT}" y="18" font-size="13">{escape(f"{title}, {name}")}</text>')
        for down, row in enumerate(rows):
            y = TOP + 22 + CELL_HEIGHT * down
            parts.append(f'<text x="{left + LEFT - 6}" y="{y + 17}" text-anchor="end">{escape(row)}</text>')
            for across, values in enumerate(columns.values()):
                x = left + LEFT + CELL_WIDTH * across
                cell, ink = shade(values[down])
                parts.append(f'<rect x="{x}" y="{y}" width="{CELL_WIDTH - 1}" height="{CELL_HEIGHT - 1}" fill="{cell}" '
                             'stroke="#dddddd"/>')
                parts.append(f'<text x="{x + CELL_WIDTH / 2}" y="{y + 17}" text-anchor="middle" fill="{ink}">'
                             f"{values[down]:.2f}</text>")
        for across, number in enumerate(columns):
            x = left + LEFT + CELL_WIDTH * (across + 0.5)
            parts.append(f'<text x="{x}" y="{TOP + 14}" text-anchor="middle">{escape(number)}</text>')
        parts.append(f'<text x="{left + LEFT}" y="{height - 8}">rows: {escape(row_label)}</text>')
        left += own_width
    return "\n".join([*parts, "</svg>"]) + "\n"
