"""Options of the networks, as a recipe's [network] has them."""

from dataclasses import dataclass

from mvm.network.extras import DESIGNS, TIMES
from mvm.options import at_least, choose

SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (4, 64, 4),
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (28, 1152, 18),  # heads of 64, as the others have; DiT's and SiT's 16 of 72 are 1 to 3 % slower on an H200
}
MODULATIONS = ("own", "shared")
CONDITIONINGS = ("adaln", "in-context")
WIDE = (2, 2048, 16)  # of every published size: it must be wider than a latent token, however small the backbone
HEAD_SIZES: dict[str, tuple[int, int, int]] = {**dict.fromkeys(SIZES, WIDE), "tiny": (2, 128, 4)}


def _check_dimensions(dimensions: tuple[int, int, int], head: str = "") -> None:
    depth, width, heads = dimensions
    if min(dimensions) < 1 or width % heads or (width // heads) % 4:
        raise ValueError(
            f"network.{head}depth={depth}, network.{head}width={width}, network.{head}heads={heads}: "
            f"{head}width must be a multiple of 4 * {head}heads, and {head}depth at least 1"
        )


@dataclass(frozen=True)
class DiTConfig:
    """Network: a diffusion transformer. `size` sets depth, width and heads; each may be overridden."""

    size: str = "S"
    """Published size, which sets depth, width and heads. One of: tiny, S, B, L, XL."""
    patch: int = 2
    """Side of the patch that becomes one token, in pixels (or latents)."""
    depth: int = 0
    """Number of blocks; 0: by network.size."""
    width: int = 0
    """Channels of a token (hidden size), a multiple of 4 * heads; 0: by network.size."""
    heads: int = 0
    """Attention heads; 0: by network.size."""
    inner_block: int = 0
    """Block (1-based) after which an inner head predicts as well, for internal guidance; 0: none."""
    skip: bool = False
    """Long skip connections: the output of block n is added, by a learned map, before block depth + 1 - n (U-ViT)."""
    local: bool = False
    """Add a depthwise 3x3 convolution of the tokens before every block."""
    modulation: str = "own"
    """adaLN modulation: one linear map per block, or one map for all blocks with an offset each (as in PixArt; a third
    fewer weights). One of: own, shared."""
    design: str = "modern"
    """Blocks: modern (RMSNorm, rotary positions, SwiGLU), classic as in DiT and SiT (LayerNorm, sine positions, GELU),
    or as in LightningDiT and RAE, and in RAEv2. One of: modern, classic, lightning, raev2."""
    time: str = "level"
    """What is embedded for time: the noise level, the path's time t or 1-t, DDPM's training step at equal
    signal-to-noise ratio (on variance-preserving), or t by random Fourier features.
    One of: level, t, 1-t, step, fourier."""
    dropout: float = 0.0
    """Dropout in training: fraction of the channels hidden from each branch of each block, per image; 0: none."""
    kind: str = "dit"
    """Network: a DiT, a DDT (deep backbone, wide shallow head) for latents, or one of your own by
    module:PACKAGE.MODULE:CLASS. One of: dit, ddt."""

    def __post_init__(self) -> None:
        choose("network.size", self.size, SIZES)
        choose("network.design", self.design, DESIGNS)
        choose("network.time", self.time, TIMES)
        choose("network.modulation", self.modulation, dict.fromkeys(MODULATIONS))
        if not 0 <= self.dropout < 1:
            raise ValueError(f"network.dropout={self.dropout} is out of range; it must be at least 0 and less than 1")
        at_least("network.patch", self.patch, 1)
        _check_dimensions(self.dimensions)
        depth = self.dimensions[0]
        if not 0 <= self.inner_block < depth:
            raise ValueError(f"network.inner_block={self.inner_block} must lie in [0, {depth - 1}] (0: no inner head)")

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """(depth, width, heads), overrides applied."""
        depth, width, heads = SIZES[self.size]
        return self.depth or depth, self.width or width, self.heads or heads


@dataclass(frozen=True)
class DDTConfig(DiTConfig):
    """Network: a DDT, whose backbone has the options of a DiT, followed by those of the head."""

    patch: int = 1
    conditioning: str = "adaln"
    """How noise level and class enter the backbone: by modulation (adaln), or as tokens after those of the image, in
    blocks without modulation. One of: adaln, in-context."""
    time_tokens: int = 4
    """Tokens that carry the noise level, with in-context conditioning."""
    class_tokens: int = 8
    """Tokens that carry the class, with in-context conditioning."""
    head_depth: int = 0
    """Number of blocks of the head; 0: by network.size."""
    head_width: int = 0
    """Channels of a token in the head, a multiple of 4 * head_heads; 0: by network.size."""
    head_heads: int = 0
    """Attention heads of the head; 0: by network.size."""
    kind: str = "ddt"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("skip", "local", "dropout"):
            if value := getattr(self, option):
                raise ValueError(f"network.{option}={value} is for network.kind='dit'; a ddt has none")
        if self.modulation != "own":
            raise ValueError(f"network.modulation='{self.modulation}' is for network.kind='dit'; a ddt's is 'own'")
        if self.design == "classic":
            raise ValueError("network.design='classic' is for network.kind='dit'; a ddt's is 'modern'")
        choose("network.conditioning", self.conditioning, dict.fromkeys(CONDITIONINGS))
        at_least("network.time_tokens", self.time_tokens, 1)
        at_least("network.class_tokens", self.class_tokens, 1)
        _check_dimensions(self.head_dimensions, "head_")

    @property
    def head_dimensions(self) -> tuple[int, int, int]:
        """(depth, width, heads) of the head, overrides applied."""
        depth, width, heads = HEAD_SIZES[self.size]
        return self.head_depth or depth, self.head_width or width, self.head_heads or heads


CONDITIONS = ("labels", "vector", "tokens", "image", "none")
OWN_CONDITION = "own"  # condition.kind of an own dataset: any tensor or structure of tensors


@dataclass(frozen=True)
class ConditionConfig:
    """What a sample is conditioned on."""

    kind: str = "labels"
    """Condition: class labels, a vector, tokens (embedded text), an image (more input channels), or none.
    One of: labels, vector, tokens, image, none."""
    width: int = 0
    """Length of the vector, width of a token, or channels of the image. 0: read from the folder; labels have none."""
    length: int = 0
    """Number of tokens of condition.kind tokens, shorter texts padded. 0: read from the folder."""
    encoder: str = ""
    """Folder of the transformers text encoder that embeds captions as tokens; empty: the data hold embeddings."""

    def __post_init__(self) -> None:
        if self.kind != OWN_CONDITION:
            choose("condition.kind", self.kind, dict.fromkeys(CONDITIONS))
        at_least("condition.width", self.width, 0)
        at_least("condition.length", self.length, 0)
        if self.width and self.kind in ("labels", "none"):
            raise ValueError(f"condition.width={self.width} is for vectors, tokens and images, not '{self.kind}'")
        if self.kind != "tokens" and (self.length or self.encoder):
            raise ValueError(
                f"condition.length and condition.encoder are for tokens, not '{self.kind}'; leave them out"
            )

    @property
    def words(self) -> str:
        """Kind and shape, as a reader wants them."""
        shapes = {"vector": f" of {self.width}", "image": f" of {self.width} channels"}
        shapes["tokens"] = f" of width {self.width}, {self.length} at most"
        return f"{self.kind}{shapes.get(self.kind, '')}"

    @property
    def channels(self) -> int:
        """Channels that join those of a network's input."""
        return self.width if self.kind == "image" else 0

    @property
    def missing(self) -> str:
        """The option without which nothing can be built, which the data's folder may say; "" where none is."""
        if self.kind in ("labels", "none"):
            return ""
        needed = ("width", "length") if self.kind == "tokens" else ("width",)
        return next((f"condition.{name}" for name in needed if not getattr(self, name)), "")


BY_LABELS = ConditionConfig()
