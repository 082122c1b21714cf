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


def line_plot(title: str, x_label: str, y_label: str, curves: list[Curve],
              y_range: tuple[float, float] | None = None) -> str:
    """An SVG picture. Points outside of y_range are cut off at its edge."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x_low, x_high = 0.0, max(xs)
    y_low, y_high = y_range or (min(ys), max(ys))
    margin = 0.03 * (y_high - y_low)
    y_low, y_high = y_low - margin, y_high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = TOP + (y_high - min(max(y, y_low), y_high)) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    names = list(dict.fromkeys(curve.name for curve in curves))
    legend = 16 * len(names) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + legend}" '
        f'width="{WIDTH}" height="{HEIGHT + legend}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT + legend}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
    ]
    for tick in ticks(x_low, x_high):
        x, y = place(tick, y_low)
        parts.append(f'<text x="{x}" y="{y + 15}" text-anchor="middle">{tick:g}</text>')
    for tick in ticks(y_low, y_high):
        x, y = place(x_low, tick)
        parts.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    centre = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">'
                 f"{escape(y_label)}</text>")
    for curve in curves:
        colour = COLOURS[names.index(curve.name) % len(COLOURS)]
        path = "L".join(f"{x} {y}" for x, y in (place(*point) for point in curve.points))
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
    """An SVG picture with the name of every mark beside it, and its range as a line."""
    width, height = 640, 400
    x_high = 1.25 * max(mark.x for mark in marks)  # names are to the right
    y_low, y_high = min(mark.low for mark in marks), max(mark.high for mark in marks)
    margin = 0.06 * (y_high - y_low) or 0.1  # one mark without a range
    y_low, y_high = y_low - margin, y_high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / x_high * (width - LEFT - RIGHT)
        return round(across, 1), round(TOP + (y_high - y) / (y_high - y_low) * (height - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
    ]
    for tick in ticks(0, x_high):
        x, y = place(tick, y_low)
        parts.append(f'<text x="{x}" y="{y + 15}" text-anchor="middle">{tick:g}</text>')
    for tick in ticks(y_low, y_high):
        x, y = place(0, tick)
        parts.append(f'<path d="M{x} {y}H{width - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<text x="{(LEFT + width - RIGHT) / 2}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>')
    centre = (TOP + height - BOTTOM) / 2
    parts.append(f'<text transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    for index, mark in enumerate(marks):
        colour = COLOURS[index % len(COLOURS)]
        x, y = place(mark.x, mark.y)
        parts.append(f'<path d="M{x} {place(mark.x, mark.low)[1]}V{place(mark.x, mark.high)[1]}" stroke="{colour}"/>')
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
