"""Every experiment: its settings as the paper has them, one step of it, and strictness about changes."""

import dataclasses
import re
from typing import get_args, get_type_hints

import pytest
import torch

from selfnorm.data.dataset import Dataset
from selfnorm.linalg.polish import POLISHES
from selfnorm.train.loop import Trainer
from selfnorm.train.recipe import Recipe, from_toml, override, to_toml
from selfnorm.train.recipes import DEFAULT, RECIPES, build_flow, build_loss, find_recipe, idle_settings, recipe_for

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
    shape, levels = SHAPES.get(recipe.data, ((2,), None))
    generator = torch.Generator().manual_seed(0)
    if levels is None:
        parts = [torch.randn(n, *shape, generator=generator, dtype=torch.float32) for _ in range(3)]
    else:
        parts = [torch.randint(0, levels, (n, *shape), generator=generator, dtype=torch.uint8) for _ in range(3)]
    return Dataset(recipe.data, *parts, levels)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_a_step(name):
    recipe = dataclasses.replace(RECIPES[name], batch_size=2, init_examples=2)
    trainer = Trainer(recipe, made_up(recipe))
    trainer.start()
    before = {key: value.clone() for key, value in trainer.loss.named_parameters()}
    metrics = trainer._step(0, 0, 1e-3)
    assert not trainer._step.failed
    assert torch.isfinite(metrics.surrogate)
    changed = {key for key, value in trainer.loss.named_parameters() if not torch.equal(value, before[key])}
    linear = {key for key in before if re.search(r"\.weight(_inv)?$", key) and "net" not in key}
    assert linear <= changed
    assert any(key.endswith("weight_inv") for key in linear) == (recipe.kind == "selfnorm")


def test_the_names_that_people_were_promised():
    assert set(RECIPES) >= NAMED
    assert DEFAULT == "digits-fc-snf"
    assert all(name == recipe.name for name, recipe in RECIPES.items())


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [  # Keller et al. (2021), appendix A.3
        ("mnist-fc-.*", {"epochs": 6000, "learning_rate": 1e-4, "weight": 1.0, "layers": 2, "alpha": 0.3, "warmup_epochs": 10.0}),
        (
            "mnist-conv-.*",
            {"epochs": 1000, "learning_rate": 1e-3, "blocks": 3, "layers_per_block": 3, "kernel_size": 3},
        ),
        ("mnist-conv-snf-asym", {"inverse_kernel_size": 7}),
        ("mnist-glow-.*", {"epochs": 250, "learning_rate": 1e-3, "weight": 100.0, "blocks": 2, "steps": 16, "hidden": 512}),
        ("mnist-glow[15]x.*", {"blocks": 2, "steps": 4, "hidden": 16, "epochs": 250}),
        ("mnist-glow5x5-geco", {"kernel_size": 5, "penalty": "geco"}),
        ("cifar10-glow-.*", {"epochs": 1000, "weight": 1000.0, "blocks": 3, "steps": 32, "flip": True, "jitter": 1}),
        ("cifar10-glow-snf", {"clip": 1e4}),
        ("cifar10-glow-exact", {"clip": None}),
        ("imagenet32-glow-.*", {"epochs": 15, "batch_size": 64, "warmup_epochs": 0.0, "clip": 1e4, "steps": 48, "flip": False}),
        ("(mnist|cifar10).*", {"batch_size": 100, "warmup_epochs": 10.0, "decay": 0.0}),
        (".*-exact", {"kind": "exact"}),
        *((f".*-{kind}", {"kind": kind}) for kind in ("relative", "lu", "tracked", "sketch", "emerging", "exp")),
        (".*-(snf|geco)", {"kind": "selfnorm"}),
    ],
)
def test_settings_are_the_papers(pattern, settings):
    matching = [recipe for name, recipe in RECIPES.items() if re.fullmatch(pattern, name)]
    assert matching
    for recipe in matching:
        assert {key: getattr(recipe, key) for key in settings} == settings, recipe.name


@pytest.mark.parametrize("name", RECIPES)
def test_toml_round_trip(name):
    assert from_toml(to_toml(RECIPES[name]), "here") == RECIPES[name]


def test_toml_round_trip_of_awkward_values():
    recipe = Recipe(
        'q"uote\\ and é 😀\x7f\n', data="C:\\dir", weight=1e-7, clip=1e22, learning_rate=0.1 + 0.2, levels=17, patience=3
    )
    assert from_toml(to_toml(recipe), "here") == recipe


def test_overrides_are_read_by_their_type():
    changed = override(
        find_recipe(DEFAULT), ["weight=3", "clip=1e4", "flip=TRUE", "epochs = 7", "model=conv", "data=a=b", "patience=none"]
    )
    assert (changed.weight, changed.clip, changed.flip, changed.epochs) == (3.0, 1e4, True, 7)
    assert isinstance(changed.weight, float)
    assert (changed.model, changed.data, changed.patience) == ("conv", "a=b", None)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("epoch=3", "did you mean epochs"),
        ("colour=3", "learning_rate"),  # all keys are listed
        ("name=x", "expected one of"),
        ("epochs", "key=value"),
        ("epochs=1.5", "a whole number, got '1.5'"),
        ("epochs=true", "a whole number"),
        ("weight=heavy", "a number"),
        ("flip=1", "true or false"),
        ("model=mlp", "fc, conv, glow"),
        ("epochs=0", "at least 1"),
        ("weight=-1", "at least 0"),
        ("weight=nan", "weight"),
        ("learning_rate=inf", "finite"),
        ("learning_rate=0", "learning_rate"),
        ("decay=2", "decay"),
        ("levels=300", "levels"),
        ("epochs=none", "a whole number"),
    ],
)
def test_wrong_overrides_are_refused(setting, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        override(find_recipe(DEFAULT), [setting])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "does not parse"),
        ('name = "x"\ncolour = 1', "unknown colour"),
        ("epochs = 3", "no name"),
        ('name = "x"\nepochs = "3"', "epochs"),
        ('name = "x"\nflip = 1', "flip"),
        ('name = "x"\nepochs = true', "epochs"),
    ],
)
def test_wrong_files_are_refused(text, words):
    with pytest.raises(ValueError, match=f"here.*{words}"):
        from_toml(text, "here")


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

    first, again, other = build(recipe), build(recipe), build(dataclasses.replace(recipe, seed=1))
    assert first.bijection[4].weight.dtype == torch.float32, "in float32, whatever the default (here float64)"
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
    assert recipe.model == model
    steps = recipe.epochs * max(1, examples // recipe.batch_size)
    assert 2500 <= steps <= 10_000


def test_what_holds_the_inverse_reaches_the_loss_and_survives_a_file():
    settings = ["symmetric=true", "polish=low-rank", "polish_every=7", "debias=3", "debias_keep=0.25", "probes=2"]
    recipe = override(find_recipe("digits-fc-snf"), settings)
    assert from_toml(to_toml(recipe), "file") == recipe
    loss = build_loss(recipe, build_flow(recipe, (1, 8, 8), 17))
    assert (loss.polish, loss.polish_every, loss.debias, loss.debias_keep, loss.probes) == ("low-rank", 7, 3, 0.25, 2)
    assert loss.symmetric
    assert override(recipe, ["polish=None"]).polish is None


def test_recipes_know_every_polish():
    (literal,) = (choice for choice in get_args(get_type_hints(Recipe)["polish"]) if choice is not type(None))
    assert set(get_args(literal)) == set(POLISHES)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("debias_keep=1", "expected debias_keep between 0 and 1"),
        ("debias_keep=0", "expected debias_keep between 0 and 1"),
        ("polish_every=0", "expected polish_every at least 1"),
        ("debias=-1", "expected debias at least 0"),
        ("learning_rate=0", "expected learning_rate above 0"),
        ("polish=shine", "--set polish: expected one of newton-schulz"),
    ],
)
def test_nonsense_about_the_inverse_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        override(find_recipe("digits-fc-snf"), [setting])


def test_idle_settings():
    settings = ["polish=low-rank", "probes=2"]
    assert idle_settings(override(find_recipe("digits-fc-lu"), settings)) == ["probes", "polish"]
    assert idle_settings(override(find_recipe("digits-fc-snf"), settings)) == []
