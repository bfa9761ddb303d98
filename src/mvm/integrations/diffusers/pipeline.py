"""MVMPipeline: class-conditional images by a network of mvm, in diffusers' manner."""

import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from mvm import noise
from mvm.generate import asked_classes
from mvm.integrations.diffusers.scheduler import Generators, MVMScheduler, check_generators
from mvm.integrations.diffusers.transformer import MVMTransformer2DModel, PredictionField, asked_dtype, published_model
from mvm.latent import Pixels
from mvm.latent.codec import require_unit_scale
from mvm.model import Model, load
from mvm.options import choose, nearest
from mvm.path import full_time
from mvm.pictures import to_pillow
from mvm.pixels import to_uint8
from mvm.published.diffusers import PARTS, pipeline_options, scheduler_options
from mvm.recipes import SampleConfig
from mvm.solver.guidance import guided_at

OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "pil": lambda x: [to_pillow(image) for image in to_uint8(x).cpu()],
    "np": lambda x: OUTPUTS["pt"](x).permute(0, 2, 3, 1).cpu().numpy(),
    "pt": lambda x: ((x.float() + 1) / 2).clamp(0, 1),
    "latent": lambda x: x,
}
# (pipeline, index of the step, its timestep, tensors) -> the tensors that it changed, or None
StepCallback = Callable[["MVMPipeline", int, Tensor, dict[str, Any]], dict[str, Any] | None]


def _as_model(model_or_run: Model | str | Path) -> Model:
    model = model_or_run if isinstance(model_or_run, Model) else load(model_or_run)
    if not isinstance(model.codec, Pixels):
        kind = model.recipe.codec.kind
        raise ValueError(
            f"codec.kind='{kind}': MVMPipeline makes pixels, not latents; sample this model with mvm.generate"
        )
    require_unit_scale(model.codec, "MVMPipeline")
    return model


class MVMPipeline(DiffusionPipeline):
    """Images of classes.

    id2label: the names of the classes. settings: nfe, cfg, low, high and internal, as in a recipe's [sample], for calls
    that do not say otherwise.
    """

    model_cpu_offload_seq = "transformer"
    _callback_tensor_inputs = ("latents",)

    def __init__(
        self,
        transformer: MVMTransformer2DModel,
        scheduler: MVMScheduler,
        id2label: dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        names = {str(label): name for label, name in (id2label or {}).items()}
        self.register_to_config(id2label=names, settings=dict(settings or {}))
        SampleConfig(**self.config["settings"])  # refuses what makes no sense
        self._check_scheduler()

    @classmethod
    def from_mvm(cls, model_or_run: Model | str | Path, **options: Any) -> "MVMPipeline":
        """Return the pipeline of a model, a run directory or a shipped model; options: those of MVMScheduler.

        Solver, its options, rho and settings not given are those of its recipe; times fitted by `mvm tune` are used as
        `mvm.sample` does, unless solver or solver_options is given. A DDT's backbone is never shared
        between steps here.
        """
        model = _as_model(model_or_run)
        recipe = model.recipe
        if "solver" in options:  # another solver has other options
            recipe = replace(recipe, sample=replace(recipe.sample, solver=options["solver"]))
        own = scheduler_options(recipe)
        if recipe.sample.unnamed and not {"solver", "solver_options"} & options.keys():
            own["tuned"] = [entry.as_dict() for entry in model.tuned.values()] or None
        both = {**(own["solver_options"] or {}), **(options.get("solver_options") or {})}
        return cls._of(model, MVMScheduler(**{**own, **options, "solver_options": both or None}))

    @classmethod
    def _of(cls, model: Model, scheduler: MVMScheduler) -> "MVMPipeline":
        return cls(MVMTransformer2DModel.from_mvm(model), scheduler, **pipeline_options(model.recipe, model.classes))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> "MVMPipeline":
        """Return the pipeline of a folder, or of OWNER/NAME or OWNER/NAME@REVISION on the hub.

        A folder that `mvm export` wrote is read as `mvm.load` reads it, every file checked; of diffusers' options it
        takes dtype, revision, token, cache_dir, force_download, local_files_only and scheduler. What `save_pretrained`
        wrote is read by diffusers: safetensors, and no other classes than those of this package.
        """
        name = os.fspath(pretrained_model_name_or_path)
        model = published_model(name, kwargs, taken=("scheduler",))
        if model is None:
            folder = name if Path(name).is_dir() else cls.download(name, **kwargs)
            index: Any = cls.load_config(folder)
            for part, kind in PARTS.items():
                if index.get(part) != kind:  # diffusers would import what the folder names
                    raise ValueError(f"{name}: model_index.json names {index.get(part)!r} as {part}; it must be {kind}")
            return super().from_pretrained(folder, **{**kwargs, "use_safetensors": True})
        given = kwargs.get("scheduler")
        pipe = cls.from_mvm(model) if given is None else cls._of(_as_model(model), given)
        pipe.transformer.network.to(asked_dtype(kwargs))
        return pipe

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs: Any) -> str:
        """Return the folder of a downloaded pipeline; diffusers' own would refuse one whose classes are not its own."""
        from diffusers.pipelines.pipeline_utils import snapshot_download  # mvm.published.hub alone imports the hub

        names = ("cache_dir", "force_download", "local_files_only", "token", "revision")
        asked = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        return snapshot_download(pretrained_model_name, allow_patterns=["*.json", "*.safetensors"], **asked)

    @property
    def labels(self) -> dict[str, int]:
        """The classes by name."""
        return {name: int(label) for label, name in self.config["id2label"].items()}

    def get_label_ids(self, names: str | Sequence[str]) -> list[int]:
        """Return the numbers of classes given by name."""
        asked, labels = [names] if isinstance(names, str) else list(names), self.labels
        for name in asked:
            if name not in labels:
                raise ValueError(f"class_labels='{name}' is no class of this model{nearest(name, labels)}; see .labels")
        return [labels[name] for name in asked]

    def _check_scheduler(self) -> None:
        """Raise unless the scheduler takes the network's answers for what they are."""
        if not isinstance(self.scheduler, MVMScheduler):
            raise ValueError(f"scheduler={type(self.scheduler).__name__}: this network needs an MVMScheduler")
        for option in ("prediction_type", "schedule", "T"):
            said, trained = self.scheduler.config[option], self.transformer.config[option]
            if said != trained:
                raise ValueError(f"scheduler {option}='{said}': this network was trained with {option}='{trained}'")

    def _label_tensor(self, class_labels: int | str | Sequence[int | str]) -> Tensor:
        asked, numbers = [class_labels] if isinstance(class_labels, int | str) else list(class_labels), []
        if not asked:
            raise ValueError("class_labels is empty; give one class per image")
        for label in asked:
            try:
                numbers.append(self.get_label_ids(label)[0] if isinstance(label, str) else operator.index(label))
            except TypeError:
                wrong = f"{label!r} is neither a number nor a name of a class"
                raise ValueError(f"class_labels: {wrong}; see .labels") from None
        classes = asked_classes(numbers, self.transformer.config["num_classes"])
        return torch.tensor(classes, device=self._execution_device)

    def _settings(self, **asked: Any) -> SampleConfig:
        """Return the settings of a call."""
        given = {name: value for name, value in asked.items() if value is not None}
        settings = replace(SampleConfig(**self.config["settings"]), **given)
        for known, missing in (("conditional", "classes to guide to"), ("null", "null class to guide from")):
            if settings.cfg != 1 and not self.transformer.config[known]:
                raise ValueError(f"guidance_scale={settings.cfg}: this network knows no {missing}; use 1")
        return settings

    def _first(self, batch: int, generator: Generators, seeds: Sequence[int] | None, latents: Tensor | None) -> Tensor:
        """Return the noise to start from: as given, by mvm's seeds, or by torch's generators."""
        shape, device = tuple(self.transformer.config["sample_shape"]), self._execution_device
        if latents is not None:
            if latents.shape != (batch, *shape):
                raise ValueError(f"latents of shape {tuple(latents.shape)} must be of shape {(batch, *shape)}")
            return latents.to(device)
        if seeds is not None:
            return noise.initial(noise.as_seeds(seeds, batch, device), shape)
        return randn_tensor((batch, *shape), generator=generator, device=torch.device(device), dtype=torch.float32)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        generator: Generators = None,
        seeds: Sequence[int] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = _callback_tensor_inputs,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Return images, one per class label (numbers or names).

        guidance_interval: where guidance acts, in log-SNR progress. generator: torch's, one or one per image. seeds: in
        its place one number per image, for mvm's own noise: the images are those of mvm's sampler with these seeds.
        latents: the noise to start from. output_type: pil, np (B, H, W, C) or pt (B, C, H, W) in [0, 1], or latent, in
        [-1, 1] and not clipped.
        """
        produce = choose("output_type", output_type, OUTPUTS)
        self._check_scheduler()
        low, high = guidance_interval or (None, None)
        settings = self._settings(nfe=num_inference_steps, cfg=guidance_scale, low=low, high=high)
        labels = self._label_tensor(class_labels)
        if seeds is not None and generator is not None:
            raise ValueError("generator and seeds are both given; give one of the two")
        check_generators(generator, len(labels))
        unknown = set(callback_on_step_end_tensor_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise ValueError(f"callback_on_step_end_tensor_inputs={sorted(unknown)}: only latents can be had")
        # its own for every call, so that calls in several threads, or one inside another, do not disturb each other
        options = {} if seeds is None else {"seeds": list(seeds)}
        options |= self.scheduler.tuned_options(settings)
        scheduler = MVMScheduler.from_config(self.scheduler.config, **options)
        assert isinstance(scheduler, MVMScheduler)
        scheduler.set_timesteps(settings.nfe, device=self._execution_device)
        x = self._first(len(labels), generator, scheduler.config["seeds"], latents) * scheduler.init_noise_sigma
        field, rules = PredictionField(self.transformer), settings.guidance()
        for index, t in enumerate(self.progress_bar(scheduler.timesteps)):
            guided = guided_at(field, rules, float(t), scheduler.schedule)
            prediction = guided(x, full_time(x, float(t)), labels)
            x = scheduler.step(prediction, t, x, generator=generator, return_dict=False)[0]
            if callback_on_step_end is not None:
                x = (callback_on_step_end(self, index, t, {"latents": x}) or {}).get("latents", x)
        images = produce(x)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)
