"""Draw docs/images/limits-over-time.svg: what three limits of "60 a minute" let pass, by the limits themselves.

    PYTHONPATH=src python tools/limit_figure.py

A test keeps the figure up to date.
"""

from pathlib import Path
from typing import Final

from headgate import Limiter, ManualClock, MemoryStore

FIGURE: Final = Path(__file__).resolve().parent.parent / "docs" / "images" / "limits-over-time.svg"
LIMITS: Final = (("60/minute", "#1b6ac9"), ("60/minute burst 10", "#b3541e"), ("60/minute sliding", "#2e7d32"))
SECONDS, TRIES = 125, 10  # of a caller that tries so many times a second
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, MOST = 760, 380, 60, 50, 40, 200


def passed(limit: str) -> list[tuple[float, int]]:
    """When another request has passed, and how many had until then."""
    clock = ManualClock()
    limiter = Limiter(limit, store=MemoryStore(clock=clock))
    found = [(0.0, 0)]
    for step in range(SECONDS * TRIES):
        now, count = step / TRIES, found[-1][1]
        while limiter.check("caller"):
            count += 1
        if count > found[-1][1]:
            found.append((now, count))
        clock.advance(1 / TRIES)
    return [*found, (float(SECONDS), found[-1][1])]


def draw() -> str:
    """The figure, as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        "<title>Requests that pass, of a caller that never stops trying</title>",
        "<style>text { font: 13px sans-serif; fill: #444 }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22">Requests that have passed, of a caller that tries all the time</text>',
    ]
    for count in range(0, MOST + 1, 60):
        parts.append(f'<path d="M{_x(0)} {_y(count)}H{_x(SECONDS)}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{_y(count) + 4}" text-anchor="end">{count}</text>')
    for second in range(0, SECONDS, 30):
        clock = f"12:{second // 60:02}:{second % 60:02}"
        parts.append(f'<path d="M{_x(second)} {_y(0)}v5" stroke="#555"/>')
        parts.append(f'<text x="{_x(second)}" y="{_y(0) + 20}" text-anchor="middle">{clock}</text>')
    for place, (limit, colour) in enumerate(LIMITS):
        steps = passed(limit)
        line = f"M{_x(0)} {_y(0)}" + "".join(f"H{_x(now)}V{_y(count)}" for now, count in steps)
        parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = HEIGHT - BOTTOM - 60 + 20 * place
        parts.append(f'<path d="M{LEFT + 396} {y - 4}h24" stroke="{colour}" stroke-width="3"/>')
        first = [count for now, count in steps if now < 60][-1]
        label = f"{limit}: {first} in the first minute"
        parts.append(f'<text x="{LEFT + 428}" y="{y}" style="fill: {colour}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _x(second: float) -> float:
    return round(LEFT + second * (WIDTH - LEFT - 20) / SECONDS, 1)


def _y(count: int) -> float:
    return round(HEIGHT - BOTTOM - count * (HEIGHT - BOTTOM - TOP) / MOST, 1)


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
