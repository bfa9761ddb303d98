"""A scheduler of a network of mvm is refused in another model's pipeline, which would be told times in [0, 1]."""

import diffusers
import pytest
import torch
from tests.integrations.test_diffusers_swap import PIPELINES

from mvm.integrations.diffusers import MVMPipeline, MVMScheduler

REMEDY = r"MVMScheduler\.from_config\(pipe\.scheduler\.config\)"


def own():
    return {
        "of MVMPipeline": MVMPipeline.from_mvm("digits").scheduler,
        "its config again": MVMScheduler.from_config(MVMPipeline.from_mvm("digits").scheduler.config, rho=0.5),
        "told in diffusers' words": MVMScheduler(prediction_type="epsilon", schedule="variance-preserving"),
        "a flow": MVMScheduler(prediction_type="flow_prediction", schedule="linear-flow"),
    }


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("kind", list(own()))
def test_a_scheduler_of_a_network_of_mvm_is_refused_by_other_pipelines(name, kind):
    make, call = PIPELINES[name]
    pipe = make()
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = own()[kind]
    with pytest.raises(ValueError, match=f"{type(pipe).__name__}.*{REMEDY}"):
        call(pipe, 2, 5)


def test_one_that_was_stored_is_refused_too(tmp_path):
    MVMPipeline.from_mvm("digits").scheduler.save_pretrained(tmp_path)
    make, call = PIPELINES["DDPM"]
    pipe = make()
    pipe.scheduler = MVMScheduler.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REMEDY):
        call(pipe, 2, 5)


def test_the_scheduler_of_another_network_is_refused_by_ours():
    pipe = MVMPipeline.from_mvm("digits")
    pipe.scheduler = MVMScheduler.from_config(diffusers.DDPMScheduler().config)
    with pytest.raises(ValueError, match="scheduler"):
        pipe([3], seeds=[0])


def test_its_own_pipeline_a_loop_and_a_pipeline_around_a_network_of_mvm_go_on():
    pipe = MVMPipeline.from_mvm("digits")
    assert pipe([3], seeds=[0], num_inference_steps=2).images
    scheduler = MVMScheduler.from_config(pipe.scheduler.config)
    scheduler.set_timesteps(3)
    assert len(scheduler.timesteps) == 3

    class Custom(diffusers.DiffusionPipeline):
        def __init__(self, transformer, scheduler):
            super().__init__()
            self.register_modules(transformer=transformer, scheduler=scheduler)

        @torch.no_grad()
        def __call__(self):
            self.scheduler.set_timesteps(3)
            return self.scheduler.timesteps

    assert len(Custom(pipe.transformer, scheduler)()) == 3
    compiled = Custom(pipe.transformer, scheduler)
    compiled.transformer = torch.compile(pipe.transformer, backend="eager")
    assert len(compiled()) == 3
