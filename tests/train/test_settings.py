"""Settings by path, by flat key and in files: what is read, what is written, and what is refused."""

import json
import re

import pytest

from selfnorm.train.experiments import DEFAULT, RECIPES, find_recipe
from selfnorm.train.folder import RunFolder
from selfnorm.train.recipe import Recipe
from selfnorm.train.settings import checked_toml, from_mapping, from_toml, override, to_toml


@pytest.mark.parametrize("name", RECIPES)
def test_toml_round_trip(name):
    assert from_toml(to_toml(RECIPES[name]), "here") == RECIPES[name]


def test_toml_round_trip_of_awkward_values():
    settings = {"data": "C:\\dir", "weight": 1e-7, "clip": 1e22, "learning_rate": 0.1 + 0.2, "levels": 17, "patience": 3}
    recipe = Recipe('q"uote\\ and é 😀\x7f\n').changed(**settings)
    assert from_toml(to_toml(recipe), "here") == recipe


def test_overrides_are_read_by_their_type():
    changed = override(
        find_recipe(DEFAULT), ["weight=3", "clip=1e4", "flip=TRUE", "epochs = 7", "model=conv", "data=a=b", "patience=none"]
    )
    assert (changed.objective.reconstruction_weight, changed.optimiser.clip) == (3.0, 1e4)
    assert (changed.data.flip, changed.optimiser.epochs) == (True, 7)
    assert isinstance(changed.objective.reconstruction_weight, float)
    assert (changed.architecture.model, changed.data.source, changed.evaluation.patience) == ("conv", "a=b", None)


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
        ("header=2", "true or false or none"),
        ('drop=["a", 1]', 'drop: expected a list of texts, as ["a", "b"], got'),
        ('drop=["a"', 'drop: expected a list of texts, as ["a", "b"], got'),
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
        ('name = "x"\n[data]\ndrop = "a"', r"data\.drop to be a list of texts, .* got 'a'"),
        ('name = "x"\n[data]\nkeep = [1]', r"data\.keep to be a list of texts, .* got \[1\]"),
    ],
)
def test_wrong_files_are_refused(text, words):
    with pytest.raises(ValueError, match=f"here.*{words}"):
        from_toml(text, "here")


# The keys of recipes before there were groups: the path of each, and a value other than the default.
FLAT = {
    "paper": ("paper", "table 9"),
    "data": ("data.source", "mnist"),
    "data_dir": ("data.folder", "somewhere"),
    "levels": ("data.levels", 16),
    "flip": ("data.flip", True),
    "jitter": ("data.jitter", 2),
    "model": ("architecture.model", "glow"),
    "kind": ("architecture.kind", "exact"),
    "layers": ("architecture.layers", 7),
    "activation": ("architecture.activation", "spline"),
    "alpha": ("architecture.alpha", 0.75),
    "bins": ("architecture.bins", 9),
    "rotate": ("architecture.rotate", True),
    "blocks": ("architecture.blocks", 4),
    "layers_per_block": ("architecture.layers_per_block", 6),
    "steps": ("architecture.steps_per_block", 4),
    "hidden": ("architecture.hidden", 32),
    "kernel_size": ("architecture.kernel_size", 5),
    "inverse_kernel_size": ("architecture.inverse_kernel_size", 7),
    "standardize": ("architecture.standardize", True),
    "penalty": ("objective.penalty", "mdmm"),
    "weight": ("objective.reconstruction_weight", 10.0),
    "tolerance": ("objective.tolerance", 0.25),
    "weight_rate": ("objective.multiplier_rate", 0.5),
    "damping": ("objective.damping", 2.0),
    "probes": ("objective.probes", 3),
    "epochs": ("optimiser.epochs", 13),
    "batch_size": ("optimiser.batch_size", 17),
    "learning_rate": ("optimiser.learning_rate", 0.0625),
    "warmup_epochs": ("optimiser.warmup_epochs", 1.5),
    "decay": ("optimiser.decay", 0.375),
    "clip": ("optimiser.clip", 1000.0),
    "graphs": ("optimiser.graphs", False),
    "precision": ("optimiser.precision", "bf16"),
    "init_examples": ("optimiser.init_examples", 19),
    "seed": ("optimiser.seed", 23),
    "on_divergence": ("optimiser.on_divergence", "rollback"),
    "threads": ("optimiser.threads", 2),
    "validate_every": ("evaluation.validate_every", 29),
    "patience": ("evaluation.patience", 31),
    "eval_batch_size": ("evaluation.batch_size", 37),
    "test_samples": ("evaluation.test_samples", 41),
}

EARLIER_TOML = """\
name = "mine"
paper = "table 9"
data = "digits"
# data_dir is not set
levels = 16
model = "glow"
kind = "tracked"
steps = 4
penalty = "geco"
weight = 1000
# weight_rate is not set
eval_batch_size = 37
batch_size = 17
"""

# Settings added since then: the same.
ADDED = {
    "inverse_likelihood": ("objective.inverse_likelihood", True),
    "header": ("data.header", False),
    "drop": ("data.drop", ("id", 'a "b", c')),
    "keep": ("data.keep", ("0",)),
    "set_outliers_aside": ("data.set_outliers_aside", False),
}
# What a file means that does not name them.
EARLIER = {"inverse_likelihood": True}

KNOWN = FLAT | ADDED


def as_text(value):
    """The value as an override has it: a list as in TOML and JSON."""
    return json.dumps(value) if isinstance(value, tuple) else str(value)


def other_values():
    """A recipe in which every setting but its name differs from the default."""
    return Recipe("mine").changed(**{key: value for key, (_, value) in KNOWN.items()})


def test_every_earlier_key_is_known():
    """There were 48 of them, in this order, five of which are gone; `selfnorm recipes NAME --json` prints them still."""
    assert [key for key in Recipe("mine").flat() if key not in ADDED] == ["name", *FLAT] and len(FLAT) == 42


def test_every_setting_is_known():
    """A new setting needs a line in `ADDED`."""
    assert set(Recipe("mine").by_path()) == {"name", *(path for path, _ in KNOWN.values())}
    assert other_values().flat() == {"name": "mine", **{key: value for key, (_, value) in KNOWN.items()}}
    assert set(other_values().differences(Recipe("mine"))) == {path for path, _ in KNOWN.values()}


@pytest.mark.parametrize("key", KNOWN)
def test_paths_and_earlier_keys_mean_the_same(key):
    path, value = KNOWN[key]
    default = Recipe("mine")
    flat, dotted, changed = (
        override(default, [f"{key}={as_text(value)}"]),
        override(default, [f"{path}={as_text(value)}"]),
        default.changed(**{key: value}),
    )
    assert flat == dotted == changed == default.changed(**{path: value}) != default
    assert flat.by_path() == {**default.by_path(), path: value}
    assert from_mapping({"name": "mine", "inverse_likelihood": False} | {key: value}, "here") == flat
    assert from_toml(to_toml(flat), "here") == flat


@pytest.mark.parametrize("name", ["source", "folder", "steps_per_block", "reconstruction_weight", "multiplier_rate"])
def test_new_names_need_no_group(name):
    path, value = next((path, value) for path, value in FLAT.values() if path.endswith(f".{name}"))
    assert override(Recipe("mine"), [f"{name}={value}"]) == Recipe("mine").changed(**{path: value})


def test_a_batch_size_without_a_group_is_the_optimisers():
    recipe = override(Recipe("mine"), ["batch_size=7", "evaluation.batch_size=9"])
    assert (recipe.optimiser.batch_size, recipe.evaluation.batch_size) == (7, 9)


def test_toml_has_a_table_for_each_group():
    text = to_toml(other_values())
    assert re.findall(r"^\[(.*)\]$", text, re.MULTILINE) == ["data", "architecture", "objective", "optimiser", "evaluation"]
    assert "[objective]\npenalty" in text and "reconstruction_weight = 10.0\n" in text
    assert from_toml(text, "here") == other_values()
    assert "# inverse_kernel_size is not set\n" in to_toml(Recipe("mine"))


def test_a_file_of_an_earlier_version_is_read():
    recipe = from_toml(EARLIER_TOML, "here")
    expected = {"levels": 16, "model": "glow", "kind": "tracked", "steps": 4, "penalty": "geco", "weight": 1000.0}
    assert recipe == Recipe("mine", "table 9").changed(**expected, **EARLIER, eval_batch_size=37, batch_size=17)
    assert isinstance(recipe.objective.reconstruction_weight, float)
    assert from_toml(to_toml(recipe), "here") == recipe


def test_a_mapping_of_an_earlier_version_is_read():
    flat = other_values().flat()
    assert from_mapping(flat, "here") == other_values()
    assert from_mapping({**flat, "clip": None, "threads": None}, "here") == other_values().changed(clip=None, threads=None)


def test_settings_that_are_gone_are_told_only_if_they_were_on(recwarn):
    off = {"symmetric": False, "polish_every": 100, "debias": 0, "debias_keep": 0.5}
    assert from_mapping({"name": "mine"} | off, "here") == Recipe("mine").changed(**EARLIER)
    assert from_mapping({"name": "mine", "objective": off}, "here") == Recipe("mine").changed(**EARLIER)
    assert not recwarn.list
    for setting in ({"symmetric": True}, {"polish": "low-rank"}, {"debias": 4}):
        with pytest.warns(UserWarning, match="here: .* is no longer supported and is ignored"):
            assert from_mapping({"name": "mine"} | setting, "here") == Recipe("mine").changed(**EARLIER)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "x"\n[optimiser]\nepoch = 3', "optimiser.epochs.*unknown optimiser.epoch"),
        ('name = "x"\n[optimizer]\nepochs = 3', "unknown optimizer"),
        ('name = "x"\n[objective]\nweight = 3', "unknown objective.weight"),
        ('name = "x"\nepochs = 3\n[optimiser]\nepochs = 3', "optimiser.epochs once"),
        ('name = "x"\n[optimiser]\nepochs = "3"', "expected optimiser.epochs to be a whole number"),
        ('name = "x"\n[optimiser]\nepochs = 0', "expected optimiser.epochs at least 1"),
        ('name = "x"\n[architecture]\nkind = "emerging"', "expected architecture.kind to be one of selfnorm"),
        ('name = "x"\narchitecture = 3', "unknown architecture"),
        ('name = "x"\ndata = 3', "expected data.source to be text"),
    ],
)
def test_wrong_groups_are_refused(text, words):
    with pytest.raises(ValueError, match=f"here.*{words}"):
        from_toml(text, "here")


@pytest.mark.parametrize(("key", "hint"), [("epoch", "epochs"), ("optimizer.epochs", "optimiser.epochs"), ("wieght", "weight")])
def test_an_unknown_key_lists_the_known_ones(key, hint):
    recipe = Recipe("mine")
    for attempt in (lambda: recipe.changed(**{key: 3}), lambda: override(recipe, [f"{key}=3"])):
        with pytest.raises(ValueError, match=re.escape(f"got {key!r}; did you mean {hint}?")) as caught:
            attempt()
        assert all(path in str(caught.value) for path, _ in FLAT.values())


def test_a_single_column_needs_no_list():
    assert override(Recipe("mine"), ["drop=a, b"]).data.drop == ("a, b",)
    assert override(Recipe("mine"), ["keep=[]"]).data.keep == override(Recipe("mine"), ["keep="]).data.keep == ()


def test_files_of_earlier_versions_keep_every_column_of_the_users_own_table():
    older = from_toml('name = "mine"\n[data]\nsource = "table.csv"\n', "here").data
    assert older.keep == ("*",) and not older.set_outliers_aside
    assert from_toml(to_toml(Recipe("mine").changed(source="table.csv")), "here").data.set_outliers_aside
    assert from_toml('name = "mine"\n[data]\nsource = "moons"\n', "here").data.keep == ()
    assert from_toml(to_toml(Recipe("mine").changed(source="table.csv")), "here").data.keep == ()


def test_many_names_of_columns_are_written_and_read():
    names = [f'"{index}" a.b.c.[[, # \'\'\' """\\\t' for index in range(20_000)]
    recipe = Recipe("mine").changed(drop=tuple(names), keep=("x" * 100_000,))
    assert from_toml(checked_toml(recipe, "here"), "here") == recipe


def test_what_could_not_be_read_is_not_written(tmp_path):
    for recipe in (Recipe("mine").changed(drop=("x" * 5_000_000,)), Recipe("mine").changed(drop=("\r\n\ud800",))):
        with pytest.raises(ValueError, match=r"recipe.toml: expected"):
            RunFolder(tmp_path).write_recipe(recipe)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quoted", ["a", '"a"', "'a'", '""'])
@pytest.mark.parametrize(
    "around",
    ["{}", "[{}]", "x = {{{}}}", 'x = {{ y = """a"""", {}, z = " " }}', "x = {{ y = '''a'''', {}, z = ' ' }}", '# "\n{} # "'],
)
def test_no_key_is_hidden_in_what_looks_like_text(around, quoted):
    key = ".".join([quoted] * 15_000) + ("" if around == "[{}]" else " = 1")
    with pytest.raises(ValueError, match=r"here: expected a recipe, at most 10,000 characters outside of texts, got [1-4]"):
        from_toml(around.format(key), "here")


@pytest.mark.parametrize("text", ['"\\' * 500_000, '"""\\' * 500_000, "'''" * 500_001, '"\n' * 500_000, "#'" * 500_000])
def test_texts_without_an_end_are_refused(text):
    """Looking for the end of each again would take hours."""
    with pytest.raises(ValueError, match="here: expected"):
        from_toml(text, "here")
