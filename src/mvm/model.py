"""The object users hold: schedule + prediction kind + network + codec, which together are a Field."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mvm.latent import Arrays, Codec, DecoderOnly, Pixels, load_rae, load_vae
from mvm.network import DDT, Own, OwnConfig, build_network
from mvm.network import Condition as Backbone
from mvm.network.fast import cpu
from mvm.network.own import OWN, adapted, load_weights, named_network
from mvm.path import Condition
from mvm.path.condition import batched, cat, check_labels, require_finite, require_like
from mvm.published import Opened, as_foreign, is_published, open_model, shipped_models
from mvm.published.hub import as_hub_id
from mvm.published.tuned import Entry, Key
from mvm.recipes import RECIPE, Recipe, require_field_recipe
from mvm.wrapped import NetworkField, PredictedField

if TYPE_CHECKING:
    from mvm.generate import Generated


def choose_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is cuda where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("mps"):
        raise ValueError(f"device='{name}': times and noise are computed in float64, which Apple's GPUs lack; use cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).splitlines()[0].partition(". ")[0]  # torch goes on with a list of all backends
        raise ValueError(f"device='{name}' is not usable here ({reason}); try cpu") from None
    return device


def build_codec(recipe: Recipe) -> Codec:
    """Return the codec of a recipe that is trained; an autoencoder of another latent or image shape is refused."""
    config = recipe.codec
    if config.kind == "pixels":
        kind = Arrays if recipe.data.values == "float" else Pixels
        return kind(recipe.data.shape, config.scale)
    if not config.path:
        what = "the folder of an autoencoder (stage 1 writes RUN/rae)"
        raise ValueError(f"codec.kind='{config.kind}' needs codec.path, {what}")
    if config.kind == "vae":
        codec = load_vae(config.path, recipe.data.shape[-1], config.posterior)
    else:
        codec = load_rae(Path(config.path), config.encoder)
    shapes = {"latents": (codec.latent_shape, recipe.sample_shape), "images": (codec.image_shape, recipe.data.shape)}
    for what, (made, asked) in shapes.items():
        if tuple(made) != tuple(asked):
            remedy = "set codec.channels and codec.side, or prepare images of that size"
            there = f"codec.path={config.path} makes {what} {tuple(made)}"
            raise ValueError(f"{there}, the recipe has {tuple(asked)}; {remedy}")
    return codec.requires_grad_(False)


def require_codec(folder: Path, manifest: Mapping[str, Any], codec: Codec) -> None:
    """Refuse weights that were trained in the latents of another encoder or other statistics."""
    trained, now = manifest.get("codec", ""), codec.identity.get("codec", "")
    if trained and trained != now:
        there = f"{folder} was trained in latents of fingerprint {trained[:12]}, codec.path holds {now[:12]} now"
        raise ValueError(f"{there}; restore the autoencoder it was trained with")


# Images up to which a GPU should make a pass of twice as many in about the time of one, because launches and latency
# bind it (the limit is a guess, not measured). A network compiled by shape compiles one more for it.
ONE_PASS = 32


def one_pass_pays(device: torch.device, images: int) -> bool:
    """Return whether the null class and the labels of so many images go through the network together."""
    return device.type == "cuda" and images <= ONE_PASS


class Model(PredictedField):
    """A Field: model(x, t, condition) -> x0_hat, with `pair` where the network has an inner head.

    A JoinedField: few images on a GPU are guided in one call of the network.
    Of a DDT also a SharedField: its backbone may be computed on some evaluations only (mvm.solver.sharing).
    codec, network: in place of the recipe's own. fast: False samples on a CPU by the plain formulas
    (mvm.network.fast.cpu).
    """

    fast = True
    text_encoder: str  # the folder that is opened for captions, "" for none
    _no_inner = "this model has no inner head for internal guidance; train with --network.inner_block N"

    def __init__(self, recipe: Recipe, codec: Codec | None = None, network: nn.Module | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        self.kind, self.schedule, self.shift = recipe.objective.kind, recipe.path.build(), recipe.path.law.shift
        self.classes = recipe.data.class_names
        self.codec: Codec = codec or build_codec(recipe)
        self.tuned: dict[Key, Entry] = {}  # solvers with times fitted to it, by evaluations and guidance
        self.text_encoder = recipe.condition.encoder
        self.origin: dict[str, Any] = {}  # where the weights came from, of a model that was loaded
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.network: Any = network or build_network(*recipe.blueprint)

    def generate(
        self, num: int = 16, *, precision: str = "fp32", auto: "Model | str | Path | None" = None, **options: Any
    ) -> "Generated":
        """Return `num` uint8 images, with labels and cost: those of `mvm sample` with the same options, bit for bit.

            model.generate(4, classes=["ship", "horse"], seed=7, nfe=13, rho=1.0, cfg=1.5, interval=(0.6, 0.8))

        The answer also gives Pillow images (`pil()`), a `grid()`, and files (`save("x.png")`). What is not given is the
        recipe's own. precision: one of mvm.precision.PRECISIONS. auto: a weaker model of the same data, or its name,
        that guides by the scale auto_scale. options: of `mvm.generate.Sampler.generate`; make a Sampler yourself to
        compile the network, or to keep what one call prepares for the next.
        """
        from mvm.generate import Sampler  # which is built on this module

        if auto is not None and options.get("auto_scale", 1) == 1:
            raise ValueError("auto is a model that guides by a scale; give it too, e.g. auto_scale=1.42")
        if isinstance(auto, str | Path):
            auto = load(auto)
            auto.network.to(self.device)  # all that is asked of it
        return Sampler(self, precision, auto=auto).generate(num, **options)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.codec.latent_shape

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def num_classes(self) -> int:
        """The classes it can be asked for: none where its condition is no label."""
        return len(self.classes) if self.recipe.condition.kind == "labels" else 0

    def check_condition(self, condition: Condition, x: Tensor) -> Condition:
        """Return the condition with one row per sample of x: labels of the model's classes, or what its kind is."""
        if self.labelled:
            return check_labels(condition, x, self.num_classes)
        if self.recipe.condition.kind == "none":
            raise ValueError("condition is given, and this model knows none (condition.kind='none'); leave it out")
        if not (callable(null := self.network.null) or null is None):
            require_like(condition, null)
        return require_finite(batched(condition, x))

    def require_labels(self, what: str) -> None:
        """Refuse a model of another condition than class labels where something is for these alone."""
        if not self.labelled:
            kind = self.recipe.condition.kind
            raise ValueError(f"{what} is for models of class labels; this one has condition.kind='{kind}'")

    @property
    def labelled(self) -> bool:
        """Whether its condition is class labels."""
        return isinstance(self.network.null, int) and self.recipe.condition.kind == "labels"

    def _given(self, x: Tensor, condition: Condition) -> Condition:
        """Return the condition, or the null condition for all where there is none or the model knows none."""
        known = condition is not None and self.recipe.objective.conditional
        return condition if known else self._null(x, condition)

    def require_null(self) -> None:
        """Refuse a condition that is left out where training had none without."""
        kind = self.recipe.condition.kind
        if kind == "none" or self.recipe.objective.has_null:
            return
        null, given = ("class", "class labels") if kind == "labels" else ("condition", f"a condition ({kind})")
        remedy = f"give {given}, without classifier-free guidance"
        raise ValueError(f"condition=None is the null {null}, and objective.label_drop=0 trained none; {remedy}")

    def _null(self, x: Tensor, condition: Condition) -> Condition:
        """Return the null condition for the rows of x."""
        self.require_null()
        return super()._null(x, condition)

    def _inputs(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the network receives for x and t: x in the type of the weights."""
        x, time = super()._inputs(x, t)
        return x.to(next(self.network.parameters()).dtype), time

    def joins(self, x: Tensor) -> bool:
        """Return whether `both` is meant to be faster than two calls; a null that is a function needs the condition."""
        return callable(self.network.null) or one_pass_pays(x.device, x.shape[0])

    def both(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Return x0_hat of the null condition and of the condition from one call of the network with twice the rows."""
        pair = cat(self._null(x, condition), self._given(x, condition))
        null, conditional = self(torch.cat((x, x)), torch.cat((t, t)), pair).chunk(2)
        return null, conditional

    @property
    def _ddt(self) -> DDT:
        if not isinstance(self.network, DDT):
            raise ValueError("encoder sharing needs network.kind='ddt'; a DiT is one piece")
        return self.network

    def condition(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Backbone:
        """Return what the backbone says."""
        return self._ddt.condition(*self._inputs(x, t), self._given(x, labels))

    def head(self, x: Tensor, t: Tensor, labels: Tensor | None, condition: Backbone) -> Tensor:
        """Return x0_hat by a condition that may be of an earlier evaluation."""
        return self._x0(self._ddt.head(*self._inputs(x, t), condition), x, t)

    def inner(self, x: Tensor, t: Tensor, labels: Tensor | None, condition: Backbone) -> Tensor:
        """Return the inner head's x0_hat at the very x and t of the condition."""
        return self._x0(condition.inner, x, t)


def own_network(recipe: Recipe, given: nn.Module | str | None, source: str) -> Own | None:
    """Return the network that a caller gives for a recipe whose network is the caller's own; None for other recipes.

    given: a module, or what mvm.wrap returns; or module:PACKAGE.MODULE:CLASS, which is imported, as the caller typed
    it, and made by network.arguments. What a recipe names is never imported by itself.
    """
    config = recipe.network
    if not isinstance(config, OwnConfig):
        if given is not None:
            raise ValueError(f"network is given, and {source} has network.kind='{config.kind}'; leave network out")
        return None
    if given is None:
        remedy = "give network=, as it was given to mvm.train (--network module:PACKAGE.MODULE:CLASS)"
        raise ValueError(f"{source} was trained with {config.described}, which no file holds: {remedy}")
    if isinstance(given, str):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            named = OwnConfig(given, config.arguments)
            given = named_network(named, recipe.sample_shape, len(recipe.data.class_names))
    if isinstance(given, NetworkField):
        trained, now = (recipe.objective.kind, recipe.path.build()), (given.kind, given.schedule)
        if trained != now:
            raise ValueError(f"network predicts {now[0]} on {now[1]}, {source} has {trained[0]} on {trained[1]}")
        given = given.network
    own = adapted(given)
    mine, theirs = (own.time_words, own.null_words), (config.time, config.null)
    if config.kind == OWN and mine != theirs:
        trained = f"{source} was trained with '{theirs[0]}' and '{theirs[1]}'"
        remedy = "give mvm.wrap(network, time=..., null=...) as to mvm.train, or the class attributes time and null"
        raise ValueError(f"network has time '{mine[0]}' and null '{mine[1]}', {trained}; {remedy}")
    return own


def is_model(name: str) -> bool:
    """Return whether `load` would take this name: a run, an exported model, a shipped one, or an id of the hub."""
    folder = Path(name)
    local = (folder / RECIPE).is_file() or is_published(folder) or name in shipped_models() or as_foreign(name)
    return bool(local) or as_hub_id(name) is not None


def load(
    run_or_name: str | Path,
    weights: str = "ema",
    which: str = "latest",
    *,
    encoder: bool = False,
    codec: str | Path | None = None,
    network: nn.Module | str | None = None,
    allow_download: bool = False,
) -> Model:
    """Return the model of a run directory, of a folder that `mvm export` wrote, shipped in the package, or on the hub.

    Lookup order: local folder, bundled model, hub (OWNER/NAME or OWNER/NAME@REVISION). FORMAT:FILE is a checkpoint of
    another project, as in "sit:SiT-XL-2-256x256.pt" (docs/how-to/published-checkpoints.md). Nothing is executed or
    unpickled.
    weights: "ema" (default), "model" (the raw weights), or another average the run keeps ("ema-0.999", "power-0.1").
    which: the checkpoint: "latest", "best" (by previews), or a step number. An exported model has one set of weights,
    of one step. encoder: of a latent run, open the frozen encoder now; else when images are first encoded: to sample,
    its weights need not be anywhere.
    codec: the folder of its autoencoder, in place of its own. allow_download: open what the model's files name outside
    of its folder, by a path or on the hub: the encoder of its images or captions, the autoencoder of a run that holds
    none. Without it that is an error; a run may name what lies beside it on this machine. network: of a model that was
    trained with a network of your own: that network, as `mvm.train` was given it, which receives the weights; or its
    class, "module:PACKAGE.MODULE:CLASS", which is imported.
    """
    opened = open_model(run_or_name, weights, which)._replace(outside=allow_download)
    return build(opened if codec is None else opened.with_codec(codec), encoder=encoder, network=network)


def build(opened: Opened, *, encoder: bool = False, network: nn.Module | str | None = None) -> Model:
    """Return the model of stored weights; encoder, network: as in `load`."""
    recipe = require_field_recipe(opened.recipe, opened.origin["run"])
    own = own_network(recipe, network, str(opened.folder))
    codec = opened.open_codec()
    if encoder and isinstance(codec, DecoderOnly):
        _ = codec.encoder
    model = Model(recipe, codec, own).eval()
    model.text_encoder = opened.reached(recipe.condition.encoder)
    try:
        if own is not None:  # which the caller may go on to train
            load_weights(own, opened.weights, str(opened.folder))
        else:
            model.requires_grad_(False)
            model.network.load_state_dict({name: value.float() for name, value in opened.weights.items()})
    except RuntimeError as error:
        raise ValueError(f"{opened.folder} does not fit its recipe; was that edited? ({error})") from None
    if model.fast:
        cpu.apply(model.network)
    require_codec(opened.folder, {"codec": opened.codec}, model.codec)
    model.classes, model.tuned = opened.classes, dict(opened.tuned)
    tuned = {"tuned": sorted(nfe for nfe, _ in model.tuned)} if model.tuned else {}
    model.origin = {**model.codec.identity, **opened.origin, **tuned}
    return model
