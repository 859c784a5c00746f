"""Pictures of the block pool: one cell per block in the terminal, and the pool over time as a PNG.

A request is a letter and a colour. In colour a block's cell shows how far it is filled as a bar;
without colour a block that is full has a capital letter, one that is partly filled a small one.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paged_ops.engine import Occupancy

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

MAX_COLUMNS = 1040
"""A longer history is thinned out to as many steps."""
POOL_HEIGHT = 480
EMPTY, INK, FAINT = (240, 240, 243), "#282830", "#e2e2e8"


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
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    title = (
        f"The block pool over {len(history)} steps: {len(history[0].owners)} blocks of "
        f"{history[0].block_size} tokens"
    )
    stride = -(-len(history) // MAX_COLUMNS)
    history = history[::stride]
    edges = [occupancy.step - 0.5 for occupancy in history]
    edges.append(edges[-1] + stride)
    owners = sorted({owner for occupancy in history for owner in occupancy.owners if owner >= 0})
    size = min(12.0, 7 + len(history) / 40), 8 + len(owners) / 4
    figure = Figure(size, dpi=90, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    above.set(title=title, ylabel="block")
    above.locator_params(integer=True)
    num_blocks = len(history[0].owners)
    extent = edges[0], edges[-1], num_blocks - 0.5, -0.5
    above.imshow(_pixels(history), aspect="auto", interpolation="nearest", extent=extent)
    for step in preempted_at:
        above.axvline(step - 0.5, color=INK, marker="v", markevery=[1], clip_on=False)
    below.set(xlabel="step", ylim=(0, 1.02))
    below.yaxis.set_major_formatter("{x:.0%}")
    in_use = [occupancy.used / num_blocks for occupancy in history]
    below.stairs(in_use, edges, fill=True, color=FAINT)
    below.stairs([occupancy.utilisation for occupancy in history], edges, color=INK, linewidth=2)
    patches = [
        Patch(
            color=f"#{bytes(colour(owner)).hex()}",
            label=f"{letter(owner)}   {labels[owner]}".replace("$", r"\$"),
        )
        for owner in owners
    ]
    note = "pale: slots not filled yet;  line: slots that hold a token;  area: blocks in use"
    note += ";  triangle: a request preempted" * bool(preempted_at)
    figure.legend(handles=patches, title=note, loc="outside lower left", alignment="left")
    figure.savefig(path)
    width, height = figure.canvas.get_width_height()
    return width, height


def _pixels(history: Sequence[Occupancy]) -> Any:
    """Return ``[num_blocks * rows, steps, 3]``: several rows of pixels for each block."""
    import numpy

    num_blocks, block_size = len(history[0].owners), history[0].block_size
    rows = max(1, POOL_HEIGHT // num_blocks)
    owners = numpy.array([occupancy.owners for occupancy in history]).T[:, None]
    filled = numpy.array([occupancy.filled for occupancy in history]).T[:, None]
    full = numpy.array([*map(colour, range(owners.max() + 1)), EMPTY])  # the owner -1 is the last
    pale = (2 * 255 + full) // 3
    pale[-1] = EMPTY
    is_filled = numpy.arange(rows)[:, None] < numpy.round(filled * rows / block_size)
    pixels = numpy.where(is_filled[..., None], full[owners], pale[owners])
    if rows >= 4:
        pixels[:, -1] = 255  # between neighbours, so that blocks can be told apart
    return pixels.reshape(num_blocks * rows, len(history), 3).astype(numpy.uint8)
