"""MVMScheduler: the native solver's trajectories, and what users of diffusers' schedulers stumble over."""

from itertools import pairwise

import pytest
import torch

from mvm import noise, oracle
from mvm.integrations.diffusers import MVMScheduler
from mvm.path import MEAN_VELOCITY, SCHEDULES, equal_snr_scale, full_time, schedule_named
from mvm.solver import State, adams, no_noise, run, sample, solve
from mvm.solver.sampling import step_noise

SHAPE = (1, 2, 3)
SEEDS = [5, 6, 7]
NFE = 9
OURS = {"prediction_type": "u", "schedule": "mean-velocity"}  # what a network of mvm was trained on
UNFITTED = adams(spread=25.0)  # what a scheduler makes of "adams": it does not know the size of a sample
TWO = oracle.mixture(torch.linspace(-1, 1, 12).reshape(2, *SHAPE), 0.3)


def first(dtype=torch.float64):
    return noise.initial(torch.tensor(SEEDS), SHAPE, dtype)


def predict(scheduler, x, t):
    return TWO.predict(scheduler.config.prediction_type, x, full_time(x, float(t)), scheduler.schedule)


def walk(scheduler, x, timesteps=None, generator=None):
    """The samples after every step."""
    found = []
    for t in scheduler.timesteps if timesteps is None else timesteps:
        x = scheduler.step(predict(scheduler, x, t), t, x, generator=generator).prev_sample
        found.append(x)
    return found


def planned(nfe=NFE, **options):
    scheduler = MVMScheduler(**{**OURS, **options})
    scheduler.set_timesteps(nfe)
    return scheduler


def farthest(found, expected):
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("solver", "rho"), [("adams", 0.0), ("adams", 1.0), ("sa", 0.0), ("sa", 0.75), ("euler", 0.0),
                                             ("euler-maruyama", 1.0), ("deis", 0.0), ("er-sde", 1.0)])  # fmt: skip
def test_trajectory_is_the_native_solvers(schedule, solver, rho):
    path = schedule_named(schedule)
    scheduler = planned(solver=solver, rho=rho, schedule=schedule, prediction_type="x0", seeds=SEEDS)
    states = []
    native = UNFITTED if solver == "adams" else solver
    final = solve(TWO.field(path), first(), schedule=path, solver=native, nfe=NFE, rho=rho, seeds=SEEDS,
                  on_step=states.append).x  # fmt: skip
    times = scheduler.solver.plan(path, NFE, rho).times
    mapped = [1.0 if scheduler.solver.own_time else float(equal_snr_scale(t, MEAN_VELOCITY, path)) for t in times]
    found = walk(scheduler, first() * scheduler.init_noise_sigma)
    assert farthest(found, [state.x * mapped[state.index] for state in states]) < 1e-9
    assert torch.allclose(found[-1], final, atol=1e-9)


def test_float32_trajectory_is_the_native_solvers():
    states = []
    how = {"solver": UNFITTED, "nfe": NFE, "rho": 1.0, "seeds": SEEDS}
    solve(TWO.field(MEAN_VELOCITY), first(torch.float32), **how, on_step=states.append)
    assert farthest(walk(planned(rho=1.0, seeds=SEEDS), first(torch.float32)), [state.x for state in states]) < 1e-5


@pytest.mark.parametrize("kind", ["u", "v", "x0", "eps", "diffusion_v", "flow"])
def test_every_prediction_type_means_the_same(kind):
    expected = sample(TWO.field(MEAN_VELOCITY), first(), solver="sa", nfe=NFE)
    assert torch.allclose(walk(planned(solver="sa", prediction_type=kind), first())[-1], expected, atol=1e-8)


def test_solver_options_reach_the_solver():
    options = {"predictor": 2, "corrector": 0, "spread": 2.0}
    expected = sample(TWO.field(MEAN_VELOCITY), first(), solver=adams(**options), nfe=NFE)
    assert torch.equal(walk(planned(prediction_type="x0", solver_options=options), first())[-1], expected)


def test_another_solver_has_other_options():
    config = MVMScheduler(**OURS, rho=0.5, solver_options={"spread": 2.0}).config
    assert MVMScheduler.from_config(config, solver="sa").config.solver_options is None
    assert MVMScheduler.from_config(config, solver="adams").config.solver_options == {"spread": 2.0}
    assert MVMScheduler.from_config(config, solver="sa", solver_options={"tau": "start"}).solver.tau == "start"


def test_own_timesteps():
    scheduler = MVMScheduler(**{**OURS, "prediction_type": "x0"})
    scheduler.set_timesteps(timesteps=[1.0, 0.5, 0.1])
    plan = adams().plan_times(MEAN_VELOCITY, (1.0, 0.5, 0.1, 0.0), 0.0)
    expected = run(plan, lambda x, t: TWO.denoise(x, full_time(x, t), MEAN_VELOCITY), first(), no_noise).x
    assert scheduler.num_inference_steps == 3
    assert torch.allclose(walk(scheduler, first())[-1], expected, atol=1e-12)


@pytest.mark.parametrize("times", [[], [0.5, 0.7], [1.5, 0.5], [0.5, 0.0], [0.5, float("nan")]])
def test_bad_timesteps_are_refused(times):
    with pytest.raises(ValueError, match=r"timesteps=.* must fall"):
        MVMScheduler(**OURS).set_timesteps(timesteps=times)


def test_parts_of_steps_are_refused():
    with pytest.raises(ValueError, match=r"num_inference_steps=2\.5 must be a whole number"):
        MVMScheduler(**OURS).set_timesteps(2.5)


@pytest.mark.parametrize("times", [torch.tensor([500, 3, 1]), torch.tensor([0.5, 1.5, 0.2]), torch.tensor(-0.1)])
def test_noise_is_added_at_times_alone(times):
    with pytest.raises(ValueError, match=r"timesteps=.* must be times in \[0, 1\.0\]"):
        MVMScheduler(**OURS).add_noise(first(), first(), times)


def test_options_go_before_the_config():
    assert MVMScheduler.from_config(MVMScheduler(**OURS, rho=0.5).config, solver="sa").config.rho == 0.5


def test_diffusers_names_of_predictions_mean_ours():
    expected = walk(planned(solver="sa", prediction_type="eps"), first())[-1]
    scheduler = planned(solver="sa", prediction_type="epsilon")
    x = first()
    for t in scheduler.timesteps:
        x = scheduler.step(TWO.predict("eps", x, full_time(x, float(t)), MEAN_VELOCITY), t, x).prev_sample
    assert torch.equal(x, expected)


@pytest.mark.parametrize("solver", ["heun", "adaptive", "dopri5"])
def test_solvers_of_several_evaluations_are_refused_by_name(solver):
    with pytest.raises(
        ValueError, match=f"solver='{solver}'.*use one of: adams, adams-power, sa, euler, euler-maruyama"
    ):
        MVMScheduler(**OURS, solver=solver)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "adam"}, "solver='adam' is unknown"),
        ({"solver_options": {"rr": 2}}, "solver_options: 'rr' is unknown to 'adams'"),
        ({"solver": "euler", "solver_options": {"r": 2}}, "allowed: shift"),
        ({"prediction_type": "velocity"}, "prediction_type='velocity' is unknown"),
        ({"round_timesteps": True}, "round_timesteps=True: only a table of betas"),
        ({"rho": -1.0}, "rho=-1.0"),
        ({"rho": float("inf")}, "rho=inf must be finite"),
        ({"schedule": "cosine"}, "schedule='cosine'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MVMScheduler(**{**OURS, **options})


@pytest.mark.parametrize(
    ("options", "untold"),
    [
        ({}, "prediction_type and schedule"),
        ({"rho": 0.75, "solver": "sa"}, "prediction_type and schedule"),
        ({"prediction_type": "epsilon"}, "schedule"),
        ({"schedule": "linear-flow"}, "prediction_type"),
    ],
)
def test_what_the_network_was_trained_on_has_no_default(options, untold):
    """Put into a pipeline of another model, such a scheduler would tell it times in [0, 1]."""
    for make in (MVMScheduler, lambda **given: MVMScheduler.from_config(given)):
        with pytest.raises(ValueError, match=f"without {untold}: .* MVMScheduler.from_config.pipe.scheduler.config."):
            make(**options)


def test_a_stored_scheduler_says_what_it_is_for(tmp_path):
    MVMScheduler(**OURS, rho=0.5).save_pretrained(tmp_path)
    again = MVMScheduler.from_pretrained(tmp_path)
    assert (again.config.prediction_type, again.config.schedule, again.config.rho) == ("u", "mean-velocity", 0.5)
    again.set_timesteps(3)
    assert torch.equal(again.timesteps, planned(3, rho=0.5).timesteps)


@pytest.mark.parametrize("use", [lambda s: s.timesteps, lambda s: s.init_noise_sigma,
                                 lambda s: s.step(first(), 1.0, first()), lambda s: s.set_begin_index(1)])  # fmt: skip
def test_use_before_set_timesteps_says_so(use):
    with pytest.raises(ValueError, match=r"call scheduler.set_timesteps\(num_inference_steps\) first"):
        use(MVMScheduler(**OURS))


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_step_done_twice_is_done_once(rho):
    expected = walk(planned(rho=rho, seeds=SEEDS), first())
    scheduler, x = planned(rho=rho, seeds=SEEDS), first()
    for t in scheduler.timesteps:
        once = scheduler.step(predict(scheduler, x, t), t, x)
        twice = scheduler.step(predict(scheduler, x, t), t, x)
        assert torch.equal(once.prev_sample, twice.prev_sample)
        x = twice.prev_sample
    assert torch.equal(x, expected[-1])


def test_second_run_needs_no_reset():
    scheduler = planned(rho=1.0, seeds=SEEDS)
    once = walk(scheduler, first())
    assert all(torch.equal(a, b) for a, b in zip(once, walk(scheduler, first()), strict=True))


def test_run_given_up_leaves_nothing_behind():
    scheduler = planned()
    walk(scheduler, first() + 1, scheduler.timesteps[:4])
    assert torch.equal(walk(scheduler, first())[-1], walk(planned(), first())[-1])
    assert scheduler.step_index == NFE


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_image_to_image_begins_in_the_middle(told, rho):
    begin, image = 4, TWO.sample(torch.tensor(SEEDS))
    scheduler = planned(rho=rho, seeds=SEEDS)
    x = scheduler.add_noise(image, first(), scheduler.timesteps[begin])
    plan = adams().plan(MEAN_VELOCITY, NFE, rho)
    rest = adams().plan_times(MEAN_VELOCITY, plan.times[begin:], rho)
    evaluate = TWO.field(MEAN_VELOCITY)
    noises = step_noise(torch.tensor(SEEDS), x)
    expected = run(rest, lambda x, t: evaluate(x, full_time(x, t), None), x, noises).x
    if told:
        scheduler.set_begin_index(begin)
        assert scheduler.begin_index == begin
    found = walk(scheduler, x, scheduler.timesteps[begin:])[-1]
    assert torch.allclose(found, expected, atol=1e-9)


def test_begin_index_out_of_range_is_refused():
    with pytest.raises(ValueError, match="begin_index=9"):
        planned().set_begin_index(9)


def test_step_out_of_order_is_refused():
    scheduler = planned()
    walk(scheduler, first(), scheduler.timesteps[:2])
    t = scheduler.timesteps[5]
    with pytest.raises(ValueError, match=r"is step 5.*step 2.*set_timesteps"):
        scheduler.step(first(), t, first())


def test_step_after_the_last_is_refused():
    scheduler = planned()
    walk(scheduler, first())
    with pytest.raises(ValueError, match="is step 3, but the run is over"):
        scheduler.step(first(), scheduler.timesteps[3], first())


@pytest.mark.parametrize(
    ("timestep", "message"),
    [
        (0, "a whole number; pass one of scheduler.timesteps, not its index"),
        (torch.tensor(1), "a whole number"),
        (0.77777, "none of scheduler.timesteps; the nearest is"),
        (torch.tensor([1.0, 0.5, 0.5]), "take their steps together"),
    ],
)
def test_timestep_that_is_none_is_refused(timestep, message):
    with pytest.raises(ValueError, match=message):
        planned().step(first(), timestep, first())


def test_timesteps_may_be_rounded_or_repeated_for_the_batch():
    scheduler = planned()
    rounded = [t.float().expand(3) for t in scheduler.timesteps]
    found, x = [], first()
    for t, exact in zip(rounded, scheduler.timesteps, strict=True):
        x = scheduler.step(predict(scheduler, x, exact), t, x).prev_sample
        found.append(x)
    assert torch.equal(found[-1], walk(planned(), first())[-1])


@pytest.mark.parametrize("in_place", [False, True])
def test_changed_sample_counts_as_it_is(in_place):
    scheduler, plan = planned(), adams().plan(MEAN_VELOCITY, NFE, 0.0)

    def evaluate(x, t):
        return TWO.denoise(x, full_time(x, t), MEAN_VELOCITY)

    native = run(plan, evaluate, first(), no_noise, until=4)
    last = walk(scheduler, first(), scheduler.timesteps[:4])[-1]
    changed, t = last.add_(1) if in_place else last + 1, scheduler.timesteps[4]
    expected = plan.step(State(4, native.x + 1, native.history), evaluate, no_noise).x
    found = scheduler.step(predict(scheduler, changed, t), t, changed).prev_sample
    assert torch.allclose(found, expected, atol=1e-9)
    assert not torch.allclose(found, plan.step(native, evaluate, no_noise).x, atol=0.1)


def test_samples_in_a_buffer_and_outputs_changed_in_place_do_no_harm():
    scheduler, buffer = planned(rho=1.0, seeds=SEEDS), first(torch.float32)
    for t in scheduler.timesteps:
        out = scheduler.step(predict(scheduler, buffer, t), t, buffer)
        buffer.copy_(out.prev_sample)
        out.pred_original_sample.zero_()
    assert torch.equal(buffer, walk(planned(rho=1.0, seeds=SEEDS), first(torch.float32))[-1])


def test_inference_mode_is_no_obstacle():
    with torch.inference_mode():
        assert torch.equal(walk(planned(), first())[-1], walk(planned(), first())[-1])


def test_half_precision_samples_lose_nothing_between_steps():
    scheduler, x = planned(), first(torch.float32)
    exact = walk(planned(), x)[-1]
    x = x.bfloat16()
    for t in scheduler.timesteps:
        inner = x.float() if scheduler._run is None else scheduler._run.states[-1].x
        x = scheduler.step(predict(scheduler, inner, t), t, x).prev_sample
        assert x.dtype == torch.bfloat16
    assert float((x.float() - exact).abs().max()) < 0.02


def test_generators_belong_to_samples():
    def generators(seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    together = walk(planned(rho=1.0), first(), generator=generators(SEEDS))[-1]
    alone = walk(planned(rho=1.0), first()[1:2], generator=generators(SEEDS[1:2]))[-1]
    assert torch.allclose(together[1:2], alone, atol=1e-12)
    assert not torch.equal(together, walk(planned(rho=1.0), first(), generator=generators([1, 2, 3]))[-1])
    with pytest.raises(ValueError, match="generator has 2 entries for a batch of 3"):
        walk(planned(rho=1.0), first(), generator=generators([1, 2]))


def test_ode_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    walk(planned(), first(), generator=generator)
    assert torch.equal(before, generator.get_state())


def test_noise_has_one_source():
    with pytest.raises(ValueError, match="give one of the two"):
        walk(planned(rho=1.0, seeds=SEEDS), first(), generator=torch.Generator())
    with pytest.raises(ValueError, match="seeds has 1 entries for a batch of 3"):
        walk(planned(rho=1.0, seeds=[1]), first())


def test_config_goes_round_through_a_folder(tmp_path):
    options = {"solver": "sa", "rho": 0.75, "prediction_type": "x0", "solver_options": {"t_min": 1e-4}, "seeds": SEEDS}
    planned(**options).save_pretrained(tmp_path)
    loaded = MVMScheduler.from_pretrained(tmp_path)
    loaded.set_timesteps(NFE)
    assert {name: loaded.config[name] for name in options} == options
    assert torch.equal(walk(loaded, first())[-1], walk(planned(**options), first())[-1])


def test_outputs_and_small_print():
    scheduler = planned()
    assert all(s > t for s, t in pairwise(scheduler.timesteps.tolist()))
    assert (scheduler.order, scheduler.init_noise_sigma, scheduler.step_index) == (1, 1.0, None)
    x, t = first(), scheduler.timesteps[0]
    assert scheduler.scale_model_input(x, t) is x
    previous, x0 = scheduler.step(predict(scheduler, x, t), t, x, return_dict=False)
    again = scheduler.step(predict(scheduler, x, t), t, x)
    assert torch.equal(previous, again.prev_sample)
    assert torch.allclose(x0, TWO.denoise(x, full_time(x, 1.0), MEAN_VELOCITY), atol=1e-12)
    assert torch.equal(x0, again.pred_original_sample)
    times = torch.tensor([0.04, 0.25, 1.0], dtype=torch.float64)
    noised = scheduler.add_noise(torch.ones_like(x), 2 * torch.ones_like(x), times)
    assert torch.allclose(noised[:, 0, 0, 0], torch.tensor([0.96 + 0.4, 0.75 + 1.0, 2.0], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"model_output of shape \(3, 2, 2, 3\)"):
        scheduler.step(x.repeat(1, 2, 1, 1), t, x)
    for arguments in ({}, {"num_inference_steps": 3, "timesteps": [1.0]}):
        with pytest.raises(ValueError, match="give one of num_inference_steps, timesteps and sigmas"):
            scheduler.set_timesteps(**arguments)
    with pytest.raises(ValueError, match="sigmas: a network of mvm has times of its schedule"):
        scheduler.set_timesteps(sigmas=[1.0])
    with pytest.raises(ValueError, match=r"mu=1\.0 shifts the times of a flow"):
        scheduler.set_timesteps(3, mu=1.0)
    with pytest.raises(TypeError, match="no training timesteps"):
        len(scheduler)
