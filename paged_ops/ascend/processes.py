"""Other programs, with a limit to their time."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

KEPT = 4000
"""Characters of a program's output that a report has: its end."""


class Ended(NamedTuple):
    """How a program ended.

    Attributes
    ----------
    code : int or None
        Its exit code, negative for a signal; None if the time ran out.
    output : str
        The end of what it wrote.
    """

    code: int | None
    output: str


def run(
    command: Sequence[str],
    seconds: float,
    *,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run a program; one that takes longer is killed, with whatever it started.

    Parameters
    ----------
    command
        The program and its arguments. One that can't be started has the code 127.
    seconds
        It may take.
    variables
        Of its environment, beside this process's own.
    folder
        It runs in.
    """
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(variables or {})},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Ended(127, str(error))
    code: int | None
    try:
        output, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return Ended(code, output[-KEPT:])
