"""What the documents show runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch

from selfnorm.train.experiments import find_recipe
from selfnorm.train.settings import override

ROOT = Path(__file__).parents[2]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/howto.md")}
BLOCKS = [(name, block) for name, text in TEXTS.items() for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[f"{name}-{index}" for index, (name, _) in enumerate(BLOCKS)])
def test_code_runs(name, block, capsys):
    torch.set_default_dtype(torch.float32)
    namespace = {}
    exec(compile(block, name, "exec"), namespace)
    if "Loss(flow" in block:
        # The data is Gaussian: no density scores it better than its own, by more than 4 parameters can overfit.
        x = namespace["x"]
        gaussian = torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T)).log_prob(x).mean().item()
        printed = float(re.search(r"exact log-likelihood: (\S+)", capsys.readouterr().out).group(1))
        assert gaussian - 0.1 < printed < gaussian + 0.01


@pytest.mark.parametrize("name", TEXTS)
def test_commands_name_recipes_and_settings_that_exist(name):
    commands = re.findall(r"selfnorm train (\S+)((?: --set \S+)*)", TEXTS[name])
    for recipe, settings in commands:
        if not recipe.startswith("-"):
            override(find_recipe(recipe), settings.replace("--set", "").split())
