"""The torch half of each op: its fake function, its autograd rule, and attention.out.

The schemas and the kernels are in csrc/library.cpp. Importing this module loads the library and
registers the rest, once for the process.
"""

from __future__ import annotations

import torch

from paged_ops._load import load_library
from paged_ops.ops import autograd, fakes


def _define_attention_out(library: torch.library.Library) -> None:
    """Define attention.out from attention's own schema; csrc/library.cpp holds its kernel.

    The tag, which only Python can give (torch 2.13), lets compiled graphs call an op that returns
    what it writes. But Inductor would also lower attention to an overload with this tag and the
    same arguments, and then pass keyword-only constants twice. So two of these stand in another
    order here.
    """
    schema = str(torch.ops.paged.attention.default._schema).removeprefix("paged::attention")
    arguments = schema[1 : schema.rindex(") ->")]
    scale, causal = "float? scale=None", "bool causal=True"
    arguments = arguments.replace(f"{scale}, {causal}", f"{causal}, {scale}")
    tags = (torch.Tag.out,) if hasattr(torch.Tag, "out") else ()
    library.define(f"attention.out({arguments}, Tensor(a!) out) -> Tensor(a!)", tags=tags)


load_library()
_LIBRARY = torch.library.Library("paged", "FRAGMENT")  # what it registers goes when it does
_define_attention_out(_LIBRARY)
fakes.register(_LIBRARY)
autograd.register(_LIBRARY)
