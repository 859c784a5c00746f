"""Continuous batching over the paged cache: an engine in one process, without a server around it.

It runs any model that keeps to the `Model` protocol: the demo's own, or one of transformers behind
`paged_ops.integrations.transformers.PackedModel`.
"""

from paged_ops.engine.engine import Engine
from paged_ops.engine.model import LayerAttention, Model, ModelShape, PagedLayers
from paged_ops.engine.report import Occupancy, StepReport
from paged_ops.engine.request import Request, State, StopRule, never
from paged_ops.engine.sampler import Sampler

__all__ = [
    "Engine",
    "LayerAttention",
    "Model",
    "ModelShape",
    "Occupancy",
    "PagedLayers",
    "Request",
    "Sampler",
    "State",
    "StepReport",
    "StopRule",
    "never",
]
