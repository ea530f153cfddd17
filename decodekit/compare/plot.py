"""Quality against cost as an SVG picture."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from decodekit.compare import Line

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 420, 64, 48, 24, 150
COLOURS = ("#1f5fd1", "#c0392b", "#1a7f4b", "#a3600b", "#7b3fb3", "#0f7c8a")


def plot(lines: Sequence[Line], frontier: Sequence[tuple[float, float]], metric: str) -> str:
    """Recipes as points with their intervals, plain samples as a dashed line; the horizontal axis is logarithmic.

    Args:
        lines: at least one.
        frontier: (forwarded tokens a row, quality) of the best of ever more plain samples.
        metric: names the vertical axis.
    """
    costs = [line.forwarded_tokens for line in lines] + [cost for cost, _ in frontier]
    values = [bound for line in lines for bound in (line.quality.low, line.quality.high)] + [own for _, own in frontier]
    low, high = min(values), max(values)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    least, most = math.log(max(min(costs), 1)) - 0.1, math.log(max(*costs, 2)) + 0.1

    def x(cost: float) -> float:
        return LEFT + (math.log(max(cost, 1)) - least) / (most - least) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle" fill="#555">'
        "tokens through the model, a row (log scale)</text>",
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle" fill="#555">'
        f"{html.escape(metric)}</text>",
    ]
    for step in range(5):
        value = low + (high - low) * step / 4
        parts.append(
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#555">{value:.3g}</text>'
            f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        )
    for cost in sorted({min(costs), max(costs)}):
        parts.append(
            f'<text x="{x(cost):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#555">{cost:.0f}</text>'
        )
    points = [(line.forwarded_tokens, line.quality.mean) for line in lines[:1]] + list(frontier)
    if frontier:
        path = "L".join(f"{x(cost):.1f} {y(value):.1f}" for cost, value in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="#888" stroke-dasharray="5 4"/>')
        cost, value = frontier[-1]
        parts.append(
            f'<text x="{x(cost):.1f}" y="{y(value) + 16:.1f}" fill="#777" text-anchor="middle">plain samples</text>'
        )
    for place, line in enumerate(lines):
        colour, left = COLOURS[place % len(COLOURS)], x(line.forwarded_tokens)
        parts.append(
            f'<g fill="{colour}" stroke="{colour}"><path d="M{left:.1f} {y(line.quality.low):.1f}V{y(line.quality.high):.1f}"/>'
            f'<circle cx="{left:.1f}" cy="{y(line.quality.mean):.1f}" r="4"/></g>'
            f'<g fill="{colour}"><circle cx="{WIDTH - RIGHT + 16}" cy="{TOP + 8 + 20 * place}" r="4"/>'
            f'<text x="{WIDTH - RIGHT + 26}" y="{TOP + 12 + 20 * place}">{html.escape(line.recipe)}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])
