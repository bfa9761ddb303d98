"""Stage 1 of a representation autoencoder: the decoder learns by L1 + LPIPS + an adversarial loss that starts late.

Two pure functions for a loop with two optimizers, of what the decoder gives and the images it should give:

    decoder.train()
    output = decoder(RAE.noised(latents, seeds, config.tau))
    objective.generator(output, images, seeds, step, decoder.head.weight).total.backward()
    ...                                        # the decoder's step
    if config.judged(step):
        fake = decoder.eval()(latents)         # without noise, as published, and without gradient
        objective.discriminator(fake, images, seeds, step).total.backward()
        ...                                    # the step of objective.judge.heads

Images are in [-1, 1]. Both work on the samples of one process alone; so does lambda, as published.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from mvm.latent.rae import TAU
from mvm.metrics.lpips import BACKBONES, LPIPS, load_lpips
from mvm.network.pretrained import load_encoder
from mvm.objective import adversarial
from mvm.objective.adversarial import NORMS, Discriminator, TransformerFeatures, discriminator_hinge, eight_bit
from mvm.objective.matching import Loss
from mvm.options import check

OPTION = "reconstruction"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of LPIPS


@dataclass(frozen=True)
class ReconstructionConfig:
    """Losses of the decoder and their weights, and the discriminator of the adversarial one."""

    l1: float = 1.0
    """Weight of the L1 loss, of images in [0, 1]."""
    lpips: float = 1.0
    """Weight of the perceptual loss LPIPS."""
    gan: float = 0.75
    """Weight of the adversarial loss, in addition to the adaptive weight lambda; 0: no discriminator."""
    disc_start: int = 15_000  # epoch 6 of 16 at 2,502 steps each, as published
    """Step (0-based) from which the discriminator is trained."""
    gan_start: int = 20_000  # epoch 8, as published
    """Step (0-based) from which the decoder is trained by the adversarial loss."""
    tau: float = TAU
    """Strength of the noise on latents in training: its standard deviation is drawn from U(0, tau). 0: none."""
    lpips_net: str = "alex"
    """Network of LPIPS: AlexNet, or VGG16, by which RAE trains. One of: alex, vgg."""
    lpips_precision: str = "fp32"
    """Precision of the convolutions of LPIPS in training; fp32 is TF32 on a GPU, as torch has it for convolutions.
    One of: fp32, bf16."""
    lpips_weights: str = ""
    """File or folder with the weights of LPIPS; empty: the folder lpips (AlexNet) or lpips-vgg of the cache
    (MVM_CACHE)."""
    encoder: str = ""
    """Frozen vision transformer of the discriminator: a hub name, a folder, or Meta's .pth of a DINOv3."""
    resolution: int = 0
    """Side in pixels to which images are resized for the discriminator's encoder; 0: its own."""
    blocks: tuple[int, ...] = ()
    """Blocks (1-based) of the discriminator's encoder whose tokens are judged, besides the last; empty: the ends of
    its quarters."""
    norm: str = "batch"
    """Norm in the discriminator's heads: of each channel over one image, as published (image), or over 8 (batch); or of
    an image's channels in 8 groups (group). One of: batch, image, group."""
    last_norm: bool = True
    """Whether the last tokens that the discriminator judges are those after the final norm of its encoder; false: those
    before it, as published."""
    disc_schedule: str = "shared"
    """Learning rate of the discriminator: that of the decoder at the same step (shared), or the same schedule begun at
    disc_start, as published (own). One of: shared, own."""
    translate: float = 0.125
    """Augmentation of what the discriminator sees: largest translation, as a fraction of the side; 0: none."""
    colour: bool = True
    """Augmentation of what the discriminator sees: random brightness, saturation and contrast."""
    cutout: float = 0.0
    """Augmentation of what the discriminator sees: side of a square that is blanked, as a fraction of the image's;
    0: none."""

    def __post_init__(self) -> None:
        check(OPTION, self, l1=(0, 100), lpips=(0, 100), gan=(0, 100), tau=(0, 100), translate=(0, 1), cutout=(0, 1))
        check(OPTION, self, lpips_net=BACKBONES, lpips_precision=PRECISIONS)
        check(OPTION, self, disc_start=0, gan_start=0, resolution=0, norm=NORMS, disc_schedule=("shared", "own"))
        if self.l1 == self.lpips == 0:
            raise ValueError(f"{OPTION}.l1=0 and {OPTION}.lpips=0 leave nothing to restore by; give one a weight")
        if self.gan and self.gan_start < self.disc_start:
            raise ValueError(
                f"{OPTION}.gan_start={self.gan_start} comes before {OPTION}.disc_start={self.disc_start}: the decoder "
                "would follow an untrained discriminator; start it there or later"
            )

    def judged(self, step: int) -> bool:
        """Return whether the discriminator learns at a step."""
        return self.gan > 0 and step >= self.disc_start

    def adversarial(self, step: int) -> bool:
        """Return whether the decoder learns from the discriminator at a step."""
        return self.gan > 0 and step >= self.gan_start


@dataclass(frozen=True)
class Reconstruction:
    """generator(...) and discriminator(...) -> Loss; the networks are handed in on the device of the images.

    lpips and judge may be missing where their weights are 0. augmented: mvm.objective.adversarial.augmented, or the
    same compiled.
    """

    config: ReconstructionConfig
    lpips: LPIPS | None = None
    judge: Discriminator | None = None
    augmented: Callable[..., Tensor] = adversarial.augmented

    def __post_init__(self) -> None:
        for name, network in (("lpips", self.lpips), ("gan", self.judge)):
            if (weight := getattr(self.config, name)) and network is None:
                what = "the LPIPS network" if name == "lpips" else "a discriminator"
                raise ValueError(f"{OPTION}.{name}={weight} needs {what}; give it, or the weight 0")

    def augment(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Return images as they are judged."""
        return self.augmented(images, seeds, self.config.translate, self.config.colour, self.config.cutout)

    def restore(self, output: Tensor, target: Tensor) -> Loss:
        """Return the weighted sum of L1 and LPIPS, in float32; a part of weight 0 is not computed."""
        with torch.autocast(output.device.type, enabled=False):
            output, target = output.float(), target.float()
            values = {}
            if self.config.l1:
                values["l1"] = l1_loss(output, target) / 2  # half of it in [-1, 1] is that in [0, 1]
            if self.config.lpips and self.lpips is not None:
                values["lpips"] = self.lpips(output, target).mean()
            total = torch.stack([getattr(self.config, name) * value for name, value in values.items()]).sum()
        return Loss(total, {name: value.detach() for name, value in values.items()})

    def fool(self, output: Tensor, seeds: Tensor) -> Tensor:
        """Return the adversarial loss of the decoder; the discriminator neither learns nor changes by it."""
        assert self.judge is not None
        with self.judge.judging():
            return -self.judge(self.augment(output, seeds)).mean()

    def generator(self, output: Tensor, target: Tensor, seeds: Tensor, step: int, last: Tensor) -> Loss:
        """Return the decoder's loss, with the parts l1, lpips, gan, lambda, total; last: the weight of its last layer.

        Gradients are taken at the output first and carried on from there, so that LPIPS and the discriminator have one
        backward pass each, though lambda needs the gradient of both. Before gan_start there is neither gan nor lambda.
        """
        output = output.float()
        if not self.config.adversarial(step):
            total, parts = self.restore(output, target)
            return Loss(total, parts | {"total": total.detach()})
        image = output.detach().requires_grad_()
        restored, parts = self.restore(image, target)
        (restoring,) = torch.autograd.grad(restored, image)
        gan = self.fool(image, seeds)
        (fooling,) = torch.autograd.grad(gan, image)
        pulls = (torch.autograd.grad(output, last, pull, retain_graph=True)[0] for pull in (restoring, fooling))
        ratio = adversarial.adaptive_weight(*pulls)
        weight = self.config.gan * ratio
        pull = (output * (restoring + weight * fooling).detach()).sum()  # carries this gradient to the output
        total = (restored + weight * gan).detach() + (pull - pull.detach())
        return Loss(total, parts | {"gan": gan.detach(), "lambda": ratio, "total": total.detach()})

    def discriminator(self, output: Tensor, target: Tensor, seeds: Tensor, step: int) -> Loss:
        """Return the discriminator's loss, with the parts real, fake (mean logits), total; no gradient to the output.

        Fakes are rounded to 8-bit levels as the images were, and both are augmented alike.
        """
        if self.judge is None or not self.config.judged(step):
            raise ValueError(
                f"step {step} has no discriminator to train: {OPTION}.gan={self.config.gan}, "
                f"{OPTION}.disc_start={self.config.disc_start}; ask config.judged(step) first"
            )
        both = torch.cat((target.detach().float(), eight_bit(output)))
        real, fake = adversarial.logits_of_both(self.judge, self.augment(both, seeds.repeat(2)))
        total = discriminator_hinge(real, fake)
        parts = {"real": real.detach().mean(), "fake": fake.detach().mean(), "total": total.detach()}
        return Loss(total, parts)


def build(config: ReconstructionConfig) -> Reconstruction:
    """Return the objective with its networks, read from where the configuration says; the heads are drawn anew."""
    if config.gan and not config.encoder:
        raise ValueError(f"{OPTION}.gan={config.gan} needs {OPTION}.encoder: the vision transformer that judges")
    lpips = None
    if config.lpips:
        lpips = load_lpips(config.lpips_weights, config.lpips_net, dtype=PRECISIONS[config.lpips_precision])
    judge = None
    if config.gan:
        encoder = load_encoder(config.encoder, config.resolution, OPTION)
        judge = Discriminator(TransformerFeatures(encoder, config.blocks, config.last_norm), config.norm)
    return Reconstruction(config, lpips, judge)
