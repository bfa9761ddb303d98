"""A recipe as a page: what it is, what it costs, and every option with its value and meaning, as a TOML file."""

import json
import textwrap
from typing import Any

import torch

from mvm.latent.rae import decoder_cost
from mvm.network import SIZES, OwnConfig, build_network, parameters
from mvm.optim.optimizers import muon_parts, newton_schulz_flops
from mvm.options import meanings
from mvm.recipes.docs import option_docs, table_docs
from mvm.recipes.memory import training_memory
from mvm.recipes.reading import AnyRecipe, load_recipe, options, shipped
from mvm.recipes.schema import TASK, DecoderRecipe, Recipe
from mvm.store import balanced
from mvm.untrusted import printable

# Share of the matrix ceiling that training reached on one NVIDIA H200 (790 TFLOP/s), by network size;
# measured by benchmarks/training_speed.py.
H200_FLOPS = 790e12
ONE_GPU = 512  # images of a step that recipes give to one GPU
NODE = 8  # GPUs that NVLink joins
SHOWN_BATCH = 256  # images a GPU that memory is given for where a step has more
H200_MFU = {"S": 0.335, "B": 0.485, "L": 0.523, "XL": 0.518}  # L: benchmarks/cost_fit.py; XL: 16 heads, half recomputed


def training_flops(recipe: AnyRecipe) -> float:
    """Return 6 x multiply-adds of one forward pass: forward and backward of one image, nothing computed twice.

    Of a decoder's recipe: of the decoder alone, without the frozen networks around it.
    """
    return 6.0 * recipe.multiply_adds


def has_estimate(recipe: Recipe) -> bool:
    """Whether the speed of such a network was measured: DiTs of the published depths and widths."""
    network = recipe.network
    published = network.kind == "dit" and network.size in H200_MFU
    return published and network.dimensions[:2] == SIZES[network.size][:2]


def hours_on_h200(recipe: Recipe) -> float:
    """Return the hours of training on one H200, at the share of the ceiling that was measured."""
    images = recipe.train.steps * recipe.train.batch
    return training_flops(recipe) * images / (H200_FLOPS * H200_MFU[recipe.network.size]) / 3600


def muon_matrices(recipe: Recipe) -> list[tuple[torch.Size, int]]:
    """Return shape and parts of each matrix that Muon has; none with another optimizer."""
    with torch.device("meta"):
        named = build_network(*recipe.blueprint).named_parameters()
    return [(p.shape, parts) for name, p in named if (parts := muon_parts(recipe.train, name, p))]


def newton_schulz_shares(recipe: Recipe, gpus: int) -> list[int]:
    """Return the FLOP of Newton-Schulz in a step on each of so many GPUs."""
    work, shares = [newton_schulz_flops(*each) for each in muon_matrices(recipe)], [0] * gpus
    for flops, place in zip(work, balanced(work, gpus), strict=True):
        shares[place] += flops
    return shares


def costs(recipe: AnyRecipe) -> list[str]:
    """Return lines on size and compute; a folder that is not opened yet has no shape, and its network no cost."""
    images = recipe.train.steps * recipe.train.batch
    training = f"training  {images / 1e6:.4g} M images, {recipe.train.steps} steps of {recipe.train.batch}"
    if isinstance(recipe, DecoderRecipe):  # without hours: most of a step is spent in the networks around it
        if not recipe.side:
            return [training]
        values, products = decoder_cost(recipe.decoder, recipe.side)
        size = f"{values / 1e6:.1f} M parameters, {products / 1e9:.3g} G multiply-adds per image"
        return [f"decoder   {size}, without its first layer (as wide as the encoder)", training]
    if 0 in recipe.sample_shape or recipe.condition.missing or isinstance(recipe.network, OwnConfig):
        return [training]
    batch = recipe.train.batch if recipe.train.batch <= ONE_GPU else SHOWN_BATCH  # one GPU, where that is meant for one
    need = training_memory(recipe, batch)
    lines = [
        f"network   {parameters(*recipe.blueprint) / 1e6:.1f} M parameters, "
        f"{recipe.multiply_adds / 1e9:.3g} G multiply-adds per image",
        training,
        f"memory    about {need.total / 1e9:.3g} GB for {batch} images a GPU in bf16, compiled, of which "
        f"{need.states / 1e9:.3g} GB are weights, optimizer and averages",
    ]
    if sum(shares := newton_schulz_shares(recipe, NODE)):
        most = f"of {NODE} GPUs each does at most {max(shares) / 1e12:.3g}"
        lines.append(f"Muon      {sum(shares) / 1e12:.3g} TFLOP of Newton-Schulz a step; {most}")
    if has_estimate(recipe):
        basis = "from measured throughput" + (", without REPA's encoder and projector" if recipe.repa.encoder else "")
        lines.append(f"estimate  {hours_on_h200(recipe):.2g} hours on one NVIDIA H200 ({basis})")
    return lines


def page(name: str) -> str:
    """Return the recipe as a TOML file that `mvm train` takes: its own words and costs, then every option explained."""
    recipe = load_recipe(name)
    words = [line for line in shipped().get(name, "").splitlines() if line.startswith("#")]
    head = ["", *costs(recipe), "", "Save as FILE.toml, then: mvm train FILE.toml"]
    title, *rest = (f"# {printable(line)}".rstrip() for line in (f"{recipe.name}: {recipe.description}", *head))
    lines = [title, *words, *rest, ""]
    if recipe.task != Recipe.task:
        lines += [_comment(meanings(type(recipe))[TASK]), f"{TASK} = {_toml(recipe.task)}"]
    values, docs = options(recipe), option_docs(recipe)
    for table, about in table_docs(recipe).items():
        if table:
            lines += ["", f"# {about}", f"[{table}]"]
        for option, doc in docs.items():
            if option.rpartition(".")[0] == table:
                value = values[option]
                default = "" if value == doc.default or not table else f" Default: {_toml(doc.default)}."
                lines += [_comment(doc.meaning + default), f"{option.rpartition('.')[2]} = {_toml(value)}"]
    return "\n".join(lines)


def _comment(words: str) -> str:
    return textwrap.fill(words, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _toml(value: Any) -> str:
    """Return a value as TOML has it; what a terminal would obey is escaped."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # JSON has other words for infinity
    return "".join(one if one.isprintable() else f"\\U{ord(one):08X}" for one in json.dumps(value, ensure_ascii=False))
