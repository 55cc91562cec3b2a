"""A likelihood as a module of its own, as `torch.func.functional_call` wants it."""

import torch


class LogProb(torch.nn.Module):
    """Calls `flow.log_prob`."""

    def __init__(self, flow):
        super().__init__()
        self.flow = flow

    def forward(self, x):
        return self.flow.log_prob(x)
