"""vLLM on the CPU attends with `paged_ops`: a platform plug-in that the user switches on.

vLLM's CPU platform takes no choice of attention backend. This one is the same platform, except that
it does: it knows the backends ``PAGED_OPS`` and, for latent attention, ``PAGED_OPS_MLA``. Cache,
block tables and slots stay vLLM's, read and written in place.

Nothing of vLLM is imported before it asks for the platform.
"""

from __future__ import annotations

import logging
import os

__all__ = ["platform_if_asked"]


def platform_if_asked() -> str | None:
    """Name the platform's class if the environment variable ``PAGED_VLLM`` is 1.

    vLLM calls this in each of its processes: it is an entry point in ``vllm.platform_plugins``.

    Returns
    -------
    str or None
        None leaves the choice to vLLM: where the variable isn't set, and where vLLM isn't built for
        the CPU, which is said in a warning.
    """
    if os.environ.get("PAGED_VLLM") != "1":
        return None
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() is None:
        logging.getLogger(__name__).warning(
            "PAGED_VLLM is 1, but this vLLM isn't built for the CPU: paged_ops serves nothing here"
        )
        return None
    return "paged_ops.integrations.vllm.platform.PagedCpuPlatform"
