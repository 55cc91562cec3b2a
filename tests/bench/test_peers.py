"""`selfnorm bench peers`: other libraries, installed or not.

No test checks how long anything takes, since the machine may be busy.
"""

import importlib
from dataclasses import replace

import pytest
import torch

from selfnorm.bench import peers
from selfnorm.bench.peers import FC, MISSING, Peer, peers_table
from selfnorm.bench.table import significant
from selfnorm.bench.workloads import MODELS
from selfnorm.models import fc_flow
from selfnorm.report.results import build
from support.benching import BRIEF

pytestmark = pytest.mark.usefixtures("elsewhere")
CPU = torch.device("cpu")


def test_peers_that_are_absent_say_so(monkeypatch, tmp_path):
    original = importlib.import_module

    def without(name, *rest):
        if name.split(".")[0] in ("zuko", "nflows", "normflows"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        return original(name, *rest)

    monkeypatch.setattr(peers, "import_module", without)
    monkeypatch.setattr(peers, "installed", lambda library: None)
    monkeypatch.setattr(peers, "OURS", {FC: (MODELS["digits-fc-snf"],)})
    table, rows = peers_table([FC], CPU, effort=BRIEF, command="selfnorm bench peers")
    assert [row[-1] for row in table.rows] == [None, *[MISSING] * 4] and not table.failures
    assert rows[0].step and not any(row.step for row in rows[1:])
    assert table.source["zuko"] is None and table.source["nflows"] is None and "normflows" not in table.source
    table.write(tmp_path / "peers.json")
    assert "| MAF | zuko | 784 | – |" in build(tmp_path)


def test_peers_are_timed_beside_ours(monkeypatch):
    def make():
        flow = fc_flow(784, layers=1, linear="lu")
        return flow, lambda x: -flow.surrogate(x).log_det.mean()

    def broken():
        flow = fc_flow(784, layers=1, linear="lu")
        return flow, lambda x: flow.no_such_thing

    def half_installed():
        raise ImportError("nflows needs umnn", name="umnn")

    monkeypatch.setattr(peers, "OURS", {FC: (MODELS["digits-fc-snf"], MODELS["digits-fc-lu"])})
    monkeypatch.setattr(peers, "installed", lambda library: "1.2.3")
    others = [Peer("zuko", "good", FC, make), Peer("zuko", "broken", FC, broken), Peer("nflows", "half", FC, half_installed)]
    table, rows = peers_table([FC], CPU, effort=BRIEF, peers=others)
    assert [row.name for row in rows] == [
        "selfnorm digits-fc-snf",
        "selfnorm digits-fc-lu",
        "zuko good",
        "zuko broken",
        "nflows half",
    ]
    assert [bool(row.step) for row in rows] == [True, True, True, False, False]
    cells = [dict(zip(peers.PEER_COLUMNS, row, strict=True)) for row in table.rows]
    assert cells[0]["this / ours"] == 1 and cells[2]["this / ours"] == significant(rows[2].step.median / rows[0].step.median)
    assert "no_such_thing" in cells[3]["note"] and "needs umnn" in cells[4]["note"]
    assert [line.split(":")[0] for line in table.failures] == ["zuko broken"]
    assert table.source["zuko"] == "1.2.3" and cells[2]["parameters"] == 784 * 785


def test_a_step_of_ours_that_failed_has_no_time(monkeypatch):
    make = peers.training_step

    def failing(model, device):
        step = make(model, device)
        return replace(step, failed=lambda: model.name == "digits-fc-lu")

    monkeypatch.setattr(peers, "training_step", failing)
    monkeypatch.setattr(peers, "OURS", {FC: (MODELS["digits-fc-snf"], MODELS["digits-fc-lu"])})
    table, rows = peers_table([FC], CPU, effort=BRIEF, peers=[])
    assert [bool(row.step) for row in rows] == [True, False]
    assert table.failures == ["selfnorm digits-fc-lu: a step had a non-finite loss or gradient, or lost a tracked inverse"]


@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peer.shape == FC], ids=lambda peer: peer.model)
def test_peers_that_are_there_train(peer):
    pytest.importorskip(peer.library)
    flow, loss = peer.make()
    flow.float()
    value = loss(torch.randn(3, 784, dtype=torch.float32))
    value.backward()
    assert value.shape == () and torch.isfinite(value)


def test_the_peers_glow_is_whole():
    pytest.importorskip("normflows")
    flow, loss = peers.normflows_glow((1, 8, 8), 2, 2, hidden=8)
    flow.float()
    value = loss(torch.randn(3, 1, 8, 8, dtype=torch.float32))
    assert value.shape == () and torch.isfinite(value)
