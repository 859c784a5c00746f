"""``python -m paged_ops.ascend.run_step NAME SECONDS FILE``: one step, its finding as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from paged_ops.ascend import objects
from paged_ops.ascend.finding import Finding
from paged_ops.ascend.runtime import Hung, kernels_folder, last_error, load, meaning
from paged_ops.ascend.steps import STEPS, Step


def find(step: Step, limit: float, tell: Callable[[Finding], None]) -> None:
    """Run a step in this process and make a finding of whatever it raises.

    It is told while an exception still holds the step's tensors: to free one may mean to wait for
    the device, which may never be done.
    """
    try:
        load()
        if step.unit:
            what, why = objects.described(objects.faults(kernels_folder() / f"{step.unit}.o"))
            if what:
                return tell(Finding("not run", what, why))
        torch.manual_seed(0)
        tell(step.run(limit))
    except Hung as hung:
        tell(Finding("hung", str(hung), step.if_hung))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not isinstance(error, ImportError) and (more := last_error()):
            said += f"; the runtime's last error: {more}"
        tell(Finding("error", said, meaning(said)))


def main(name: str, limit: str, file: str) -> None:
    """Run the step of that name."""

    def tell(finding: Finding) -> None:
        Path(file).write_text(json.dumps(finding._asdict()))
        # The ordinary end of a process waits for the device, too.
        os._exit(0)

    find(next(step for step in STEPS if step.name == name), float(limit), tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
