"""What the README shows runs as it stands there."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_code_runs(block, capsys):
    torch.set_default_dtype(torch.float32)
    namespace = {}
    exec(compile(block, "README.md", "exec"), namespace)
    if "exact log-likelihood" in block:
        # The data is Gaussian: no density scores it better than its own, by more than 4 parameters can overfit.
        x = namespace["x"]
        gaussian = torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T)).log_prob(x).mean().item()
        printed = float(re.search(r"exact log-likelihood: (\S+)", capsys.readouterr().out).group(1))
        assert gaussian - 0.1 < printed < gaussian + 0.01


def test_the_quickstart_runs_and_the_twins_agree(capsys):
    torch.set_default_dtype(torch.float32)
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    selfnorm, exact = map(float, re.findall(r"exact test log-likelihood (\S+)", capsys.readouterr().out))
    assert abs(selfnorm - exact) < 0.1
