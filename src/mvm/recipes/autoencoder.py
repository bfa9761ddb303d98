"""Recipes of stage 1: the decoder of a frozen encoder, which together are a representation autoencoder."""

from dataclasses import dataclass, field

from mvm.distributed.processes import EngineConfig
from mvm.latent import DecoderConfig, EncoderConfig
from mvm.latent.decoder import decoder_cost
from mvm.objective.reconstruction import ReconstructionConfig
from mvm.optim.optimizers import TrainConfig
from mvm.options import at_least
from mvm.recipes.schema import BaseRecipe, PreviewConfig, require_previews

TASK = "task"  # in a recipe: what is trained; without it a field
DECODER = "decoder"  # the task's name


@dataclass(frozen=True)
class HeldOutConfig:
    """Held-out images, restored by previews and never trained on."""

    count: int = 0
    """How many of the last images are held out, in the order of the prepared folder; where that is sorted by class
    they are of its last classes. 0: none."""

    def __post_init__(self) -> None:
        at_least("held_out.count", self.count, 0)


@dataclass(frozen=True)
class DecoderRecipe(BaseRecipe):
    """Everything that decides a run of stage 1."""

    task: str = DECODER  # ty: ignore[incompatible-attribute-override]  # a field, the first: JSON begins with it
    """What is trained: the decoder of a representation autoencoder."""
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    reconstruction: ReconstructionConfig = field(default_factory=ReconstructionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task != DECODER:
            raise ValueError(f"task='{self.task}': this is a recipe of task '{DECODER}'")
        if self.preview.every and not self.held_out.count:
            raise ValueError(
                f"preview.every={self.preview.every} restores held-out images, and held_out.count=0: "
                "hold some out, or set preview.every to 0"
            )
        if self.data.augment:
            raise ValueError(
                f"data.augment={self.data.augment} is not for decoders, which are told of none; set it to 0"
            )
        require_previews(self.train, self.preview)
        engine = self.engine  # what is made for the networks of stage 2 alone is refused, not ignored
        if engine.parallel == "fsdp":
            raise ValueError("engine.parallel='fsdp' is not for decoders, which fit one GPU; use ddp")
        if engine.compile in ("full", "graph"):
            raise ValueError(
                f"engine.compile='{engine.compile}' is not for decoders: the adversarial weight needs the gradient of "
                "their last layer alone; use blocks, or auto"
            )
        if engine.recompute or engine.kernels:
            raise ValueError("engine.recompute and engine.kernels are not for decoders; leave them at 0 and False")
        if engine.fp8 != "off":
            raise ValueError(f"engine.fp8='{engine.fp8}' is not for decoders; leave it off")

    @property
    def side(self) -> int:
        """Latents a side, as the images and the decoder's patch say; 0 while the data's folder is not opened."""
        return self.data.shape[-1] // self.decoder.patch

    @property
    def multiply_adds(self) -> int:
        """Of the decoder alone, without the frozen networks around it."""
        return decoder_cost(self.decoder, self.side).multiply_adds

    def usage(self, run: str, done: bool) -> str:
        return f"the autoencoder is {run}/rae: --codec.kind rae --codec.path {run}/rae" if done else ""
