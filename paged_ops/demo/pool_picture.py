"""Pictures of the block pool: one cell per block in the terminal, and the pool over time as a PNG.

A request is a letter and a colour. In colour a block's cell shows how far it is filled as a bar;
without colour a block that is full has a capital letter, one that is partly filled a small one.
"""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paged_ops.engine import Occupancy

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BARS = "▁▂▃▄▅▆▇█"
RESET, DIM = "\x1b[0m", "\x1b[2m"

_HUES = (0.58, 0.08, 0.36, 0.94, 0.74, 0.14, 0.48, 0.02)
"""Eight hues that stay apart next to each other; the ninth request starts over, a shade darker."""


def letter(owner: int) -> str:
    """Return the letter of a request; the 27th is A again."""
    return LETTERS[owner % len(LETTERS)]


def colour(owner: int) -> tuple[int, int, int]:
    """Return the colour of a request: red, green, blue, each 0 to 255."""
    hue = _HUES[owner % len(_HUES)]
    value = (0.92, 0.72, 0.55)[owner // len(_HUES) % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.62, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def paint(text: str, owner: int, *, in_colour: bool) -> str:
    """Return the text in the request's colour, or as it is."""
    if not in_colour:
        return text
    red, green, blue = colour(owner)
    return f"\x1b[38;2;{red};{green};{blue}m{text}{RESET}"


def cell(occupancy: Occupancy, block: int, *, in_colour: bool) -> str:
    """Draw one block: two columns in colour, one without."""
    owner, filled = occupancy.owners[block], occupancy.filled[block]
    if owner < 0:
        return f"{DIM}··{RESET}" if in_colour else "."
    if in_colour:
        bar = BARS[max(0, filled * len(BARS) // occupancy.block_size - 1)]
        return paint(letter(owner) + bar, owner, in_colour=True)
    return letter(owner) if filled == occupancy.block_size else letter(owner).lower()


def draw_pool(occupancy: Occupancy, *, width: int = 80, in_colour: bool = False) -> list[str]:
    r"""Draw the pool, one cell per block, and a line of numbers below.

    Parameters
    ----------
    occupancy : Occupancy
        The pool at one moment.
    width : int
        Columns of the terminal.
    in_colour : bool
        With ANSI colours and bars, or plain ASCII.

    Returns
    -------
    list of str
        The lines. Each row of cells begins with the id of its first block.

    Examples
    --------
    >>> occupancy = Occupancy(step=1, owners=[0, 0, -1, 1], filled=[4, 1, 0, 4], block_size=4)
    >>> print("\n".join(draw_pool(occupancy, width=40)))
       0  A a . B
       3 of 4 blocks in use, 9 of 16 slots hold a token (56%), 3 wasted in last blocks
    """
    num_blocks = len(occupancy.owners)
    cell_width = 3 if in_colour else 2
    per_row = max(1, min(32, (width - 6) // cell_width))
    if per_row > 8:
        per_row -= per_row % 8
    lines = []
    for start in range(0, num_blocks, per_row):
        blocks = range(start, min(start + per_row, num_blocks))
        cells = " ".join(cell(occupancy, block, in_colour=in_colour) for block in blocks)
        lines.append(f"{start:4d}  {cells}")
    lines.append("   " + describe(occupancy))
    return lines


def describe(occupancy: Occupancy) -> str:
    """Count the pool in one line: blocks in use, slots that hold a token, waste."""
    slots = len(occupancy.owners) * occupancy.block_size
    return (
        f"{occupancy.used} of {len(occupancy.owners)} blocks in use, "
        f"{occupancy.live_tokens} of {slots} slots hold a token "
        f"({occupancy.utilisation:.0%}), {occupancy.waste} wasted in last blocks"
    )


def draw_owners(
    occupancy: Occupancy, labels: Sequence[str], *, in_colour: bool = False
) -> list[str]:
    """Name the owners: letter, label, blocks, tokens and waste of each request in the pool."""
    lines = []
    for owner in sorted({owner for owner in occupancy.owners if owner >= 0}):
        blocks = [block for block, held in enumerate(occupancy.owners) if held == owner]
        tokens = sum(occupancy.filled[block] for block in blocks)
        waste = len(blocks) * occupancy.block_size - tokens
        name = paint(letter(owner), owner, in_colour=in_colour)
        counts = f"{len(blocks):2d} blocks, {tokens:3d} tokens, {waste:2d} wasted"
        lines.append(f"   {name}  {counts}  {labels[owner]}")
    return lines


# -------------------------------------------------------------------------------- the PNG

MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP = 64, 24, 56
MAX_COLUMNS = 1040
"""A longer history is thinned out to as many steps, one pixel each."""
POOL_HEIGHT, GAP, CURVE_HEIGHT, AXIS_HEIGHT, LEGEND_ROW = 480, 28, 120, 44, 24
BACKGROUND, EMPTY, INK, FAINT = (255, 255, 255), (240, 240, 243), (40, 40, 48), (205, 205, 212)


def save_image(
    history: Sequence[Occupancy],
    labels: Sequence[str],
    path: Path,
    *,
    preempted_at: Sequence[int] = (),
) -> tuple[int, int]:
    """Draw the pool over time into a PNG file.

    Above, x is the step, y the block id and the colour the owner; the unfilled part of a block is
    drawn paler. Below, the shares of blocks in use and of slots that hold a token.

    Parameters
    ----------
    history : sequence of Occupancy
        The pool in each step, at least one.
    labels : sequence of str
        A label for each request, for the legend.
    path : Path
        Where to write.
    preempted_at : sequence of int
        Steps in which a request was preempted; each is marked.

    Returns
    -------
    (int, int)
        Width and height of the image in pixels.
    """
    from PIL import Image, ImageDraw

    title = (
        f"The block pool over {len(history)} steps: {len(history[0].owners)} blocks of "
        f"{history[0].block_size} tokens"
    )
    history = history[:: -(-len(history) // MAX_COLUMNS)]
    column = min(24, MAX_COLUMNS // len(history))
    row = max(1, POOL_HEIGHT // len(history[0].owners))
    plot_width, plot_height = column * len(history), row * len(history[0].owners)
    width = MARGIN_LEFT + max(plot_width, 560) + MARGIN_RIGHT
    curve_top = MARGIN_TOP + plot_height + GAP
    legend_top = curve_top + CURVE_HEIGHT + AXIS_HEIGHT
    owners = sorted({owner for occupancy in history for owner in occupancy.owners if owner >= 0})
    height = legend_top + LEGEND_ROW * (len(owners) + 1)
    image = Image.new("RGB", (width, height), BACKGROUND)
    pen = ImageDraw.Draw(image)
    _draw_blocks(pen, history, column, row)
    _draw_curves(pen, history, column, curve_top)
    _draw_preemptions(pen, history, preempted_at, column, plot_height)
    _draw_axes(pen, history, column, row, curve_top)
    _text(pen, (MARGIN_LEFT, 24), title, size=18)
    _draw_legend(pen, owners, labels, legend_top, bool(preempted_at))
    image.save(path, "PNG")
    return width, height


def _text(
    pen: ImageDraw, xy: tuple[float, float], text: str, anchor: str = "lm", size: int = 14
) -> None:
    from PIL import ImageFont

    pen.text(xy, text, INK, ImageFont.load_default(size), anchor)


def _draw_blocks(pen: ImageDraw, history: Sequence[Occupancy], column: int, row: int) -> None:
    for i, occupancy in enumerate(history):
        left = MARGIN_LEFT + i * column
        for block, (owner, filled) in enumerate(
            zip(occupancy.owners, occupancy.filled, strict=True)
        ):
            top = MARGIN_TOP + block * row
            # A row of at least 4 pixels leaves one between neighbours, so that blocks can be told
            # apart.
            bottom = top + row - (2 if row >= 4 else 1)
            box = (left, top, left + column - 1, bottom)
            if owner < 0:
                pen.rectangle(box, EMPTY)
                continue
            pen.rectangle(box, _paler(colour(owner)))
            filled_height = round((bottom - top + 1) * filled / occupancy.block_size)
            if filled_height:
                pen.rectangle(
                    (left, top, left + column - 1, top + filled_height - 1), colour(owner)
                )


def _paler(rgb: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = ((255 * 2 + channel) // 3 for channel in rgb)
    return red, green, blue


def _draw_curves(pen: ImageDraw, history: Sequence[Occupancy], column: int, curve_top: int) -> None:
    bottom = curve_top + CURVE_HEIGHT
    right = MARGIN_LEFT + column * len(history)
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * CURVE_HEIGHT
        pen.line((MARGIN_LEFT, y, right, y), FAINT)
        _text(pen, (MARGIN_LEFT - 8, y), f"{share:.0%}", "rm")
    in_use = [occupancy.used / len(occupancy.owners) for occupancy in history]
    live = [occupancy.utilisation for occupancy in history]
    for shares, ink in ((in_use, FAINT), (live, INK)):
        points = [
            (MARGIN_LEFT + (i + side) * column, bottom - share * CURVE_HEIGHT)
            for i, share in enumerate(shares)
            for side in (0, 1)
        ]
        if ink == FAINT:
            pen.polygon([(MARGIN_LEFT, bottom), *points, (right, bottom)], EMPTY, FAINT)
        else:
            pen.line(points, ink, 2)


def _draw_preemptions(
    pen: ImageDraw,
    history: Sequence[Occupancy],
    preempted_at: Sequence[int],
    column: int,
    plot_height: int,
) -> None:
    for step in preempted_at:
        x = MARGIN_LEFT + column * sum(occupancy.step < step for occupancy in history)
        pen.line((x, MARGIN_TOP, x, MARGIN_TOP + plot_height), INK)
        pen.polygon([(x - 5, MARGIN_TOP - 10), (x + 5, MARGIN_TOP - 10), (x, MARGIN_TOP - 2)], INK)


def _draw_axes(
    pen: ImageDraw, history: Sequence[Occupancy], column: int, row: int, curve_top: int
) -> None:
    num_blocks = len(history[0].owners)
    every = _tick(num_blocks, 8)
    for block in range(0, num_blocks, every):
        _text(pen, (MARGIN_LEFT - 8, MARGIN_TOP + (block + 0.5) * row), str(block), "rm")
    every = _tick(history[-1].step, 10)
    for i, (before, occupancy) in enumerate(itertools.pairwise(history), 1):
        if before.step // every < occupancy.step // every:
            x = MARGIN_LEFT + (i + 0.5) * column
            _text(pen, (x, curve_top + CURVE_HEIGHT + 14), str(occupancy.step), "mm")
    middle = MARGIN_LEFT + column * len(history) / 2
    _text(pen, (middle, curve_top + CURVE_HEIGHT + 32), "step", "mm")
    _text(pen, (8, MARGIN_TOP - 14), "block")


def _tick(count: int, ticks: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that gives at most ``ticks`` ticks."""
    unit = 1
    while True:
        for factor in (1, 2, 5):
            if count <= ticks * factor * unit:
                return factor * unit
        unit *= 10


def _draw_legend(
    pen: ImageDraw, owners: Sequence[int], labels: Sequence[str], top: int, preempted: bool
) -> None:
    for i, owner in enumerate(owners):
        y = top + LEGEND_ROW * i + LEGEND_ROW / 2
        pen.rectangle((MARGIN_LEFT, y - 7, MARGIN_LEFT + 20, y + 7), colour(owner))
        _text(pen, (MARGIN_LEFT + 30, y), f"{letter(owner)}   {labels[owner]}")
    y = top + LEGEND_ROW * len(owners) + LEGEND_ROW / 2
    note = "pale: slots not filled yet;  line: slots that hold a token;  area: blocks in use"
    _text(pen, (MARGIN_LEFT, y), note + ";  triangle: a request preempted" * preempted)
