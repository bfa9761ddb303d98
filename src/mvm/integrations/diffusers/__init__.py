"""mvm in diffusers: a scheduler, a transformer and a class-conditional pipeline, loaded without remote code."""

from mvm.options import needs, quiet_torchao

try:
    quiet_torchao()
    import diffusers as _diffusers  # noqa: F401
except ImportError as error:
    raise ImportError(needs("mvm.integrations.diffusers", "diffusers", "diffusers")) from error

from mvm.integrations.diffusers.pipeline import MVMPipeline
from mvm.integrations.diffusers.scheduler import MVMScheduler, MVMSchedulerOutput
from mvm.integrations.diffusers.transformer import MVMTransformer2DModel, MVMTransformer2DOutput

__all__ = ["MVMPipeline", "MVMScheduler", "MVMSchedulerOutput", "MVMTransformer2DModel", "MVMTransformer2DOutput"]
