"""Every experiment: its settings as the paper has them, one step of it, and strictness about changes."""

import re

import pytest
import torch

from selfnorm.data.dataset import Dataset
from selfnorm.train.build import build_flow, build_loss
from selfnorm.train.experiments import DEFAULT, RECIPES, find_recipe, recipe_for
from selfnorm.train.loop import Trainer
from selfnorm.train.recipe import ArchitectureSettings, Recipe
from selfnorm.train.settings import from_toml, override, to_toml

SHAPES = {"digits": ((1, 8, 8), 17), "mnist": ((1, 28, 28), 256), "cifar10": ((3, 32, 32), 256), "imagenet32": ((3, 32, 32), 256)}

NAMED = {
    *(
        "digits-fc-snf",
        "digits-fc-exact",
        "digits-conv-snf",
        "mnist-fc-snf",
        "mnist-fc-exact",
        "mnist-conv-snf",
        "mnist-conv-exact",
    ),
    *("mnist-conv-snf-asym", "mnist-glow-snf", "mnist-glow-exact", "mnist-glow5x5-geco", "mnist-glow1x1-geco"),
    *("mnist-glow1x1-exact", "cifar10-glow-snf", "cifar10-glow-exact", "imagenet32-glow-snf", "imagenet32-glow-exact"),
    *("moons-fc-snf", "digits-conv-exact"),
    *(f"{data}-fc-{kind}" for data in ("mnist", "digits") for kind in ("relative", "lu", "tracked", "sketch")),
    *(f"{data}-conv-{kind}" for data in ("mnist", "digits") for kind in ("emerging", "exp", "tracked")),
}


def made_up(recipe, n=4):
    """Random data of the recipe's shape."""
    shape, levels = SHAPES.get(recipe.data.source, ((2,), None))
    generator = torch.Generator().manual_seed(0)
    if levels is None:
        parts = [torch.randn(n, *shape, generator=generator, dtype=torch.float32) for _ in range(3)]
    else:
        parts = [torch.randint(0, levels, (n, *shape), generator=generator, dtype=torch.uint8) for _ in range(3)]
    return Dataset(recipe.data.source, *parts, levels)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_a_step(name):
    recipe = RECIPES[name].changed(batch_size=2, init_examples=2)
    trainer = Trainer(recipe, made_up(recipe))
    trainer.start()
    before = {key: value.clone() for key, value in trainer.loss.named_parameters()}
    metrics = trainer._step(0, 0, 1e-3)
    assert not trainer._step.failed
    assert torch.isfinite(metrics.surrogate)
    changed = {key for key, value in trainer.loss.named_parameters() if not torch.equal(value, before[key])}
    linear = {key for key in before if re.search(r"\.weight(_inv)?$", key) and "net" not in key}
    assert linear <= changed
    assert any(key.endswith("weight_inv") for key in linear) == (recipe.architecture.kind == "selfnorm")


def test_the_names_that_people_were_promised():
    assert set(RECIPES) >= NAMED
    assert DEFAULT == "digits-fc-snf"
    assert all(name == recipe.name for name, recipe in RECIPES.items())


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [  # Keller et al. (2021), appendix A.3
        ("mnist-fc-.*", {"epochs": 6000, "learning_rate": 1e-4, "layers": 2, "alpha": 0.3, "warmup_epochs": 10.0}),
        ("mnist-fc-snf-paper", {"weight": 1.0, "inverse_likelihood": True, "decay": 0.0}),
        ("mnist-conv-snf-paper", {"weight": 1.0, "inverse_likelihood": True, "decay": 0.0}),
        (
            "mnist-conv-.*",
            {"epochs": 1000, "learning_rate": 1e-3, "blocks": 3, "layers_per_block": 3, "kernel_size": 3},
        ),
        ("mnist-conv-snf-asym", {"inverse_kernel_size": 7}),
        ("mnist-glow-.*", {"epochs": 250, "learning_rate": 1e-3, "blocks": 2, "steps": 16, "hidden": 512}),
        ("mnist-glow[15]x.*", {"blocks": 2, "steps": 4, "hidden": 16, "epochs": 250}),
        ("mnist-glow5x5-geco", {"kernel_size": 5, "penalty": "geco"}),
        ("cifar10-glow-.*", {"epochs": 1000, "blocks": 3, "steps": 32, "flip": True, "jitter": 1}),
        ("cifar10-glow-snf", {"clip": 1e4}),
        ("cifar10-glow-exact", {"clip": None}),
        ("imagenet32-glow-.*", {"epochs": 15, "batch_size": 64, "warmup_epochs": 0.0, "clip": 1e4, "steps": 48, "flip": False}),
        ("(mnist|cifar10).*", {"batch_size": 100, "warmup_epochs": 10.0}),
        ("(mnist|cifar10)-glow.*", {"decay": 0.0}),
        (".*-exact", {"kind": "exact"}),
        *((f".*-{kind}", {"kind": kind}) for kind in ("relative", "lu", "tracked", "sketch", "emerging", "exp")),
        (".*-(snf|geco)", {"kind": "selfnorm"}),
    ],
)
def test_settings_are_the_papers(pattern, settings):
    matching = [recipe for name, recipe in RECIPES.items() if re.fullmatch(pattern, name)]
    assert matching
    for recipe in matching:
        assert settings.items() <= recipe.flat().items(), recipe.name


def test_where_defaults_differ_from_the_paper():
    assert not any(recipe.objective.inverse_likelihood for name, recipe in RECIPES.items() if not name.endswith("-paper"))
    weights = {name: find_recipe(name).objective.reconstruction_weight for name in ("mnist-fc-snf", "mnist-glow-snf")}
    assert weights == {"mnist-fc-snf": 0.1, "mnist-glow-snf": 10.0}
    for model in ("mnist-fc-", "mnist-conv-"):
        recipes = [recipe for name, recipe in RECIPES.items() if name.startswith(model) and not name.endswith("-paper")]
        assert {recipe.optimiser.decay for recipe in recipes} == {0.25}, "all methods have the same schedule"


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"digits-fc-exact.*did you mean mnist-glow-snf"):
        find_recipe("mnist-glow-sfn")


def test_flows_are_built_from_the_seed_alone():
    recipe = find_recipe("digits-fc-snf")

    def build(recipe):
        state = torch.get_rng_state()
        flow = build_flow(recipe, (1, 8, 8), 17)
        assert torch.equal(torch.get_rng_state(), state), "the caller's random state is left alone"
        return flow

    first, again, other = build(recipe), build(recipe), build(recipe.changed(seed=1))
    assert first.bijection[4].weight.dtype == torch.float32, "in float32, for any default (here float64)"
    assert torch.get_default_dtype() == torch.float64
    assert torch.equal(first.bijection[4].weight, again.bijection[4].weight)
    assert not torch.equal(first.bijection[4].weight, other.bijection[4].weight)


@pytest.mark.parametrize(
    ("shape", "model"),
    [((2,), "fc"), ((30,), "fc"), ((1, 8, 8), "fc"), ((3, 32, 32), "glow"), ((3, 30, 30), "fc"), ((5, 40), "fc")],
)
@pytest.mark.parametrize("examples", [3, 1000, 10**6])
def test_a_recipe_for_any_shape_and_size(shape, model, examples):
    recipe = recipe_for("somewhere.csv", shape, examples)
    assert recipe.architecture.model == model
    steps = recipe.optimiser.epochs * max(1, examples // recipe.optimiser.batch_size)
    assert 2500 <= steps <= 10_000


def test_the_objective_reaches_the_loss_and_survives_a_file():
    recipe = override(find_recipe("digits-fc-snf"), ["inverse_likelihood=true", "probes=2"])
    assert from_toml(to_toml(recipe), "file") == recipe
    loss = build_loss(recipe, build_flow(recipe, (1, 8, 8), 17))
    assert loss.inverse_likelihood and loss.probes == 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("probes=-1", r"expected objective.probes in \[0, 10000\], got -1"),
        ("probes=10001", r"expected objective.probes in \[0, 10000\], got 10001"),
        ("learning_rate=0", "expected optimiser.learning_rate above 0"),
        ("inverse_likelihood=2", "--set inverse_likelihood: expected true or false"),
        ("polish=low-rank", "polish was removed: learned inverses stay accurate without it"),
        ("objective.debias=4", "debias was removed"),
    ],
)
def test_nonsense_about_the_inverse_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        override(find_recipe("digits-fc-snf"), [setting])


def test_settings_without_effect():
    settings = ["inverse_likelihood=true", "probes=2"]
    assert override(find_recipe("digits-fc-lu"), settings).without_effect() == ["probes", "inverse_likelihood"]
    assert override(find_recipe("digits-fc-snf"), settings).without_effect() == []


@pytest.mark.parametrize(
    ("model", "kind", "known"),
    [
        ("fc", "emerging", "selfnorm, exact, tracked, sketch, relative, lu for the model fc"),
        ("conv", "lu", "selfnorm, exact, tracked, emerging, exp for the model conv"),
        ("glow", "relative", "selfnorm, exact, tracked for the model glow"),
        ("fc", "magic", "got 'magic'"),
        ("vae", "exact", "one of fc, conv, glow"),
    ],
)
def test_a_wrong_kind_is_refused_at_once(model, kind, known):
    with pytest.raises(ValueError, match=known):
        Recipe("mine", architecture=ArchitectureSettings(model, kind))
    with pytest.raises(ValueError, match=known):
        override(Recipe("mine"), [f"model={model}", f"kind={kind}"])


def test_a_kind_may_change_together_with_the_model():
    recipe = override(find_recipe("digits-fc-lu"), ["kind=emerging", "model=conv"])
    assert (recipe.architecture.model, recipe.architecture.kind) == ("conv", "emerging")
    with pytest.raises(ValueError, match=r"recipe digits-fc-lu: expected architecture\.kind"):
        override(find_recipe("digits-fc-lu"), ["model=conv"])
