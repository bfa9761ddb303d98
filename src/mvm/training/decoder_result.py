"""What stage 1 ends with: the autoencoder, in a folder that stage 2 reads."""

from pathlib import Path

from mvm.latent import RAE, LatentMoments, Statistics, load_rae, measure
from mvm.training.decoder_trainer import DecoderTrainer

FOLDER = "rae"  # in a run directory


def measured(trainer: DecoderTrainer, progress: bool) -> Statistics:
    """Return the statistics of the latents of all training images, both mirrors, in full precision."""
    place = trainer.place
    mine = measure(trainer.encoder, trainer.images, rank=place.rank, world=place.world, progress=progress)
    joined = {name: place.gather(value) for name, value in mine.state().items()}
    return LatentMoments.from_state(joined).result(trainer.encoder.origin)


def _earlier(folder: Path, trainer: DecoderTrainer) -> RAE | None:
    """Return what is in the folder already; None where it is nothing, damaged, or of another encoder."""
    try:
        return load_rae(folder, trainer.encoder)
    except ValueError:
        return None


def autoencoder(trainer: DecoderTrainer, run: Path, progress: bool) -> RAE:
    """Return the autoencoder with the averaged decoder; after the last step it has statistics and is in RUN/rae.

    What is there already is kept where it is the same; statistics of an earlier end of the same run still hold.
    """
    rae = RAE(trainer.encoder, trainer.averaged_decoder()).eval()
    if trainer.step < trainer.recipe.train.steps:
        return rae
    place, folder = trainer.place, run / FOLDER
    earlier = _earlier(folder, trainer) if place.main else None
    statistics = place.broadcast(None if earlier is None else earlier.statistics)
    rae.set_statistics(statistics or measured(trainer, progress))
    same = earlier is not None and earlier.decoder.fingerprint == rae.decoder.fingerprint and statistics is not None
    with place.main_first():
        if place.main and not same:
            rae.save(folder)
    return rae
