"""vllm-ascend attends with `paged_ops`: the class that its backend gives to each layer.

vllm-ascend finds its backends in a table of its own, to which none can be added. What can be
replaced is the answer of its backend for causal attention, which vLLM asks for a class when it
builds a model. Cache, block tables and slots stay vllm-ascend's, read and written in place.

Nothing of vllm-ascend is imported before `register` is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["register", "register_if_asked"]


def register() -> None:
    """Let every causal attention layer that vllm-ascend builds from now on attend with `paged_ops`.

    ``AscendAttentionBackend.get_impl_cls`` and ``get_builder_cls`` answer with classes of this
    package then, in the whole process. Call it before the model is built, and in each process that
    builds one. Calling it twice does no harm. What isn't served is refused while the model is
    built.

    Raises
    ------
    ImportError
        vllm-ascend isn't installed.
    """
    from vllm_ascend.attention import attention_v1 as ascend

    from paged_ops.integrations.vllm_ascend.attention import PagedImpl, PagedMetadataBuilder

    backend = ascend.AscendAttentionBackend
    if backend.get_impl_cls.__module__ == __name__:
        return
    backend.get_impl_cls = staticmethod(
        _in_place_of(ascend.AscendAttentionBackendImpl, backend.get_impl_cls, PagedImpl)
    )
    backend.get_builder_cls = staticmethod(
        _in_place_of(
            ascend.AscendAttentionMetadataBuilder, backend.get_builder_cls, PagedMetadataBuilder
        )
    )


def register_if_asked() -> None:
    """Call `register` if the environment variable ``PAGED_VLLM_ASCEND`` is 1.

    vLLM calls this in each of its processes: it is an entry point in ``vllm.general_plugins``.
    """
    if os.environ.get("PAGED_VLLM_ASCEND") == "1":
        register()


def _in_place_of(usual: type, choose: Callable[[], type], ours: type) -> Callable[[], type]:
    """Return what answers with `ours` where `choose` would with `usual`, and refuses the rest."""

    def answer() -> type:
        chosen = choose()
        if chosen is not usual:
            raise NotImplementedError(
                f"vllm-ascend would attend with {chosen.__name__}, expected {usual.__name__}: "
                f"paged_ops serves no context parallelism here"
            )
        return ours

    return answer
