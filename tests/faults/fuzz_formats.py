"""Every format that mvm reads: the files of runs, prepared data, latents, samples and models; and all sources."""

import hashlib
import json
import sys
from pathlib import Path

import fuzz_seeds
import torch
from fuzz_format import Format
from fuzz_kept import KEPT
from fuzz_models import MODELS
from fuzz_mutate import spoiled_json, spoiled_npy, spoiled_npz, spoiled_safetensors, spoiled_text
from fuzz_sources import SOURCES

sys.path.append(str(Path(__file__).parent.parent))  # as pytest does; fuzz.py is a program

from mvm import checkpoint, samples
from mvm.data.prepare import prepare
from mvm.data.shards import open_prepared
from mvm.data.text import TextEncoder
from mvm.latent.cache import open_latents
from mvm.latent.encoder import load_statistics
from mvm.latent.rae import load_decoder_only
from mvm.metrics import weights
from mvm.metrics.moments import load_moments, provenance_of
from mvm.published import open_model, open_stored
from mvm.published.write import read_figures
from mvm.recipes import load_recipe
from mvm.training import logs, rundir
from text_encoders import tiny_encoder


class Text(Format):
    """A recipe in TOML."""

    name, file, share = "recipe .toml", "recipe.toml", 1.0
    spoil = staticmethod(spoiled_text)

    def lay(self) -> list[bytes]:
        return fuzz_seeds.recipes()

    def read(self) -> None:
        load_recipe(str(self.folder / self.file))


class Run(Format):
    """A run directory; subclasses spoil one of its files."""

    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        fuzz_seeds.run(self.folder)
        return [(self.folder / self.file).read_bytes()]

    def read(self) -> None:
        stored = open_stored(self.folder, "ema", "best")
        checkpoint.load(stored.folder, "ema")
        checkpoint.find(self.folder, "latest")
        open_model(self.folder, "model")
        rundir.open_run(fuzz_seeds.recipe(), self.folder, True)


class RecipeJson(Run):
    name, file = "recipe.json of a run", "recipe.json"


class Manifest(Run):
    name, file = "manifest.json of a checkpoint", "checkpoints/step-00000002/manifest.json"


class Metrics(Run):
    name, file, share = "metrics.jsonl of a run", "metrics.jsonl", 0.3
    spoil = staticmethod(spoiled_text)

    def read(self) -> None:
        logs.keep_metrics(self.folder / self.file, 2)


class Safetensors(Run):
    """Spoiled weights whose checksum the manifest tells: made on purpose, not by a bad disk."""

    name, file = "safetensors of a checkpoint", "checkpoints/step-00000002/ema.safetensors"
    spoil = staticmethod(spoiled_safetensors)

    def put(self, data: bytes) -> None:
        super().put(data)
        path = self.folder / Manifest.file
        told = json.loads(path.read_text())
        told["sha256"]["ema.safetensors"] = hashlib.sha256(data).hexdigest()
        path.write_text(json.dumps(told))


class Statistics(Format):
    name, file = "safetensors of statistics", "statistics.safetensors"
    spoil = staticmethod(spoiled_safetensors)

    def lay(self) -> list[bytes]:
        fuzz_seeds.autoencoder(self.folder)
        return [(self.folder / self.file).read_bytes()]

    def read(self) -> None:
        load_statistics(self.folder / self.file)


class Decoder(Statistics):
    name, file, share = "safetensors of a decoder", "decoder.safetensors", 0.3

    def read(self) -> None:
        load_decoder_only(self.folder)


class Autoencoder(Decoder):
    name, file, share = "rae.json", "rae.json", 0.5
    spoil = staticmethod(spoiled_json)


class Weights(Format):
    name, file = "weights .pth", "weights.pth"

    def lay(self) -> list[bytes]:
        return fuzz_seeds.pth()

    def read(self) -> None:
        weights.read_tensors([self.folder / self.file], ValueError, lambda name: not name.endswith("counter"))


class ShardMap(Format):
    name, file, share = "index of weight shards", "model.safetensors.index.json", 0.5
    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        return fuzz_seeds.shard_map(self.folder)

    def read(self) -> None:
        weights.read_tensors(weights._files_in(self.folder), ValueError, lambda name: True)


class Prepared(Format):
    """A prepared folder; subclasses spoil one of its files."""

    name, file = "index.json of prepared data", "index.json"
    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        fuzz_seeds.prepared(self.folder)
        return [(self.folder / self.file).read_bytes()]

    def read(self) -> None:
        found = open_prepared(self.folder)
        found.load()
        found.mapped().gather(torch.arange(min(2, len(found))))
        assert found.stamp


class PreparedImages(Prepared):
    name, file = "images-*.npy of prepared data", "images-00000.npy"
    spoil = staticmethod(spoiled_npy)


class PreparedLabels(PreparedImages):
    name, file = "labels-*.npy of prepared data", "labels-00000.npy"


class PreparedTokens(Prepared):
    """A prepared folder of signals with tokens."""

    name = "index.json of prepared signals and tokens"
    condition = "tokens:tokens"

    def lay(self) -> list[bytes]:
        fuzz_seeds.conditioned(self.folder, self.condition)
        return [(self.folder / self.file).read_bytes()]


class PreparedMask(PreparedTokens):
    name, file, share = "mask-*.npy of prepared data", "mask-00000.npy", 0.3
    spoil = staticmethod(spoiled_npy)


class PreparedCaptions(PreparedTokens):
    name, file, share = "captions of prepared data", "condition-00000.json", 0.3
    condition = "caption:text"


class TextConfig(Format):
    """A text encoder; subclasses spoil one of its files."""

    name, file, share = "config.json of a text encoder", "config.json", 0.1
    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        tiny_encoder(self.folder)
        return [(self.folder / self.file).read_bytes()]

    def read(self) -> None:
        TextEncoder(self.folder).embed(["a red circle"], 5)


class TextTokenizer(TextConfig):
    name, file = "tokenizer.json of a text encoder", "tokenizer.json"


class Sidecar(Prepared):
    """A shard's sidecar, read when a preparation that was interrupted goes on."""

    name, file, share = "shard-*.json of a preparation", "shard-00000.json", 0.1

    def lay(self) -> list[bytes]:
        self.source, self.out = self.folder / "source", self.folder / "out"
        fuzz_seeds.pictures(self.source)
        return [fuzz_seeds.sidecar(self.source, self.out)]

    def put(self, data: bytes) -> None:
        (self.out / "index.json").unlink(missing_ok=True)
        (self.out / self.file).write_bytes(data)

    def read(self) -> None:
        prepare(self.source, self.out, size=8, workers=1, progress=False)


class Latents(Format):
    name, file = "index.json of latents", "index.json"
    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        fuzz_seeds.latents(self.folder)
        return [(self.folder / self.file).read_bytes()]

    def read(self) -> None:
        found = open_latents(self.folder)
        found.gather(torch.tensor([0]), torch.tensor([True]))
        found.verify()


class LatentShard(Latents):
    name, file, share = "latents-*.npy", "latents-00000.npy", 0.5
    spoil = staticmethod(spoiled_npy)


class Moments(Format):
    name, file = "moments .npz", "moments.npz"
    spoil = staticmethod(spoiled_npz)

    def lay(self) -> list[bytes]:
        return fuzz_seeds.moments(self.folder)

    def read(self) -> None:
        load_moments(self.folder / self.file)
        provenance_of(self.folder / self.file).get("images")


class Samples(Format):
    """The folder of samples that are made in parts."""

    name, file, share = "samples.json, part-*.json", "samples.json", 0.7
    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        fuzz_seeds.parts(self.folder)
        return [(self.folder / self.file).read_bytes()]

    def read(self) -> None:
        found = samples.Parts(self.folder, 2, (1, 2, 2), 4, 4)
        found.provenance()
        for _ in found.batches():
            pass


class SampleCost(Samples):
    name, file, share = "samples.json, part-*.json", "part-000000.json", 0.7


class SamplePart(Samples):
    name, file, share = "part-*.npy of samples", "part-000000.npy", 0.7
    spoil = staticmethod(spoiled_npy)


class PublishedConfig(Format):
    """A published model; subclasses spoil one of its files."""

    name, file, share = "config.json of a model", "config.json", 0.4
    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        fuzz_seeds.published(self.folder)
        return [(self.folder / self.file).read_bytes()]

    def read(self) -> None:
        open_model(self.folder).open_codec()


class PublishedIndex(PublishedConfig):
    name, file, share = "model_index.json of a model", "model_index.json", 0.2


class PublishedWeights(PublishedConfig):
    name, file, share = "safetensors of a model", "model.safetensors", 0.4
    spoil = staticmethod(spoiled_safetensors)

    def put(self, data: bytes) -> None:
        super().put(data)
        path = self.folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "sha256": hashlib.sha256(data).hexdigest()}))


class Figures(Format):
    name, file, share = "figures for a card", "figures.json", 0.5
    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        return fuzz_seeds.figures()

    def read(self) -> None:
        read_figures(self.folder / self.file, ["0" * 64])


FORMATS: tuple[type[Format], ...] = (
    *(Text, RecipeJson, Manifest, Metrics, Safetensors, Statistics, Decoder, Autoencoder, Weights, ShardMap),
    *(Prepared, PreparedImages, PreparedLabels, Sidecar, Latents, LatentShard, Moments),
    *(PreparedTokens, PreparedMask, PreparedCaptions, TextConfig, TextTokenizer),
    *(Samples, SampleCost, SamplePart, *SOURCES),
    *(PublishedConfig, PublishedIndex, PublishedWeights, Figures, *KEPT, *MODELS),
)
