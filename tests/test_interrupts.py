"""Ctrl-C and SIGTERM in Python: an interrupt is a KeyboardInterrupt, and nothing swallows it."""

import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import cross_val_score

import selfnorm.estimator
from selfnorm import SelfNormDensity
from selfnorm.train.checkpoint import load
from selfnorm.train.experiments import find_recipe
from selfnorm.train.loop import Trainer
from selfnorm.train.run import start_run
from selfnorm.train.stopping import StoppedError, signals_wait

ROWS = np.exp(np.random.default_rng(0).normal(size=(200, 2)))


@pytest.fixture
def interrupted(monkeypatch):
    """Makes a trainer raise a signal in its process after a validation at a step or later."""

    def arm(number=signal.SIGINT, step=1):
        original = Trainer._validate

        def validate(self, stop):
            original(self, stop)
            if self.progress.validated >= step:
                signal.raise_signal(number)

        monkeypatch.setattr(Trainer, "_validate", validate)

    return arm


def model(**given):
    return SelfNormDensity(**{"max_steps": 200, "layers": 2, "random_state": 0, **given})


def test_ctrl_c_in_fit_is_a_keyboard_interrupt(interrupted):
    interrupted()
    fresh = model()
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT"):
        fresh.fit(ROWS)
    assert not hasattr(fresh, "flow_")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_cross_validation_stops(interrupted):
    interrupted()
    with pytest.raises(KeyboardInterrupt):
        cross_val_score(model(), ROWS, cv=3)


def test_the_best_flow_is_kept_on_request(interrupted):
    interrupted(step=60)
    with pytest.warns(ConvergenceWarning, match=r"stopped by SIGINT after \d+ of 200 steps, so the best weights so far"):
        kept = model(on_interrupt="keep").fit(ROWS)
    assert np.isfinite(kept.score_samples(ROWS)).all() and np.isfinite(kept.validation_nll_)
    assert 0 < kept.n_steps_ < 200
    worse = model(max_steps=1).fit(ROWS)
    assert kept.validation_nll_ < worse.validation_nll_  # it had learned something


@pytest.fixture
def interrupted_early(monkeypatch):
    """Makes a trainer raise SIGINT after its first epoch, before any validation."""
    original = Trainer._end_epoch

    def end_epoch(self, epoch, rate):
        original(self, epoch, rate)
        assert self.progress.best_nll is None
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "_end_epoch", end_epoch)


def test_the_flow_is_kept_before_the_first_validation(interrupted_early):
    """It came after 2 % of the steps: of 200,000 steps, the first 4,000 were lost."""
    with pytest.warns(ConvergenceWarning, match=r"stopped by SIGINT after 1 of 20000 steps, so the best .* after 1 steps"):
        kept = model(max_steps=20_000, on_interrupt="keep").fit(ROWS)
    assert kept.n_steps_ == 1 and np.isfinite(kept.validation_nll_) and np.isfinite(kept.score_samples(ROWS)).all()


def test_a_second_interrupt_keeps_nothing(interrupted_early, monkeypatch):
    monkeypatch.setattr(Trainer, "_validate", lambda self, stop: (signal.raise_signal(signal.SIGINT), stop.check()))
    with pytest.raises(KeyboardInterrupt):
        model(max_steps=20_000, on_interrupt="keep").fit(ROWS)


def test_a_flow_without_a_likelihood_is_not_kept(interrupted_early, monkeypatch):
    """Then the interrupt is raised, and no error that `cross_val_score` takes for a failed fit."""

    def singular(self, flow, examples, stop):
        raise ValueError("expected a regular weight, got a singular one")

    monkeypatch.setattr(Trainer, "_likelihood", singular)
    with pytest.raises(KeyboardInterrupt):
        model(kind="exact", max_steps=20_000, on_interrupt="keep").fit(ROWS)


def test_before_the_first_step_there_is_nothing_to_keep(monkeypatch):
    original = Trainer._loop
    monkeypatch.setattr(Trainer, "_loop", lambda self, stop: (signal.raise_signal(signal.SIGINT), stop.check(), original)[2])
    with pytest.raises(KeyboardInterrupt):
        model(on_interrupt="keep").fit(ROWS)


def test_an_interrupt_while_the_rows_are_scored_leaves_nothing_that_is_half_fitted(monkeypatch):
    """`predict` judged by the offset of an earlier fit."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    fitted = model(max_steps=20).fit(ROWS)
    monkeypatch.setattr(selfnorm.estimator, "scores_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted.fit(1000 * ROWS)
    with pytest.raises(NotFittedError):
        fitted.predict(ROWS)


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
def test_an_interrupted_second_fit_leaves_nothing_of_the_first():
    """The columns of the one with the flow of the other would give numbers all the same."""
    constant = np.c_[np.ones(200), ROWS[:, 1]]
    for first, second in ((ROWS, constant), (constant, ROWS)):
        with pytest.MonkeyPatch.context() as patched:
            fitted = model(max_steps=20).fit(first)
            patched.setattr(Trainer, "run", lambda self: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                fitted.fit(second)
        for call, given in ((fitted.score_samples, ROWS), (fitted.predict, ROWS), (fitted.sample, 2)):
            with pytest.raises(NotFittedError):
                call(given)


def test_an_ignored_interrupt_stays_ignored(interrupted):
    """As in a script that starts the program with `&`."""
    interrupted()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert model(max_steps=20).fit(ROWS).n_steps_ > 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_ends_the_process_all_the_same(interrupted):
    interrupted(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        model(on_interrupt="keep").fit(ROWS)
    assert ended.value.code == 143


def test_on_interrupt_is_checked():
    with pytest.raises(ValueError, match="expected on_interrupt to be raise or keep, got 'stop'"):
        model(on_interrupt="stop").fit(ROWS)


def test_an_interrupt_from_outside_reaches_the_caller():
    """A timer sends the signal at a moment that training does not choose."""
    armed = threading.Event()
    original = selfnorm.estimator.Trainer.start

    def start(self):
        original(self)
        armed.set()

    def send():
        armed.wait()
        for _ in range(100):
            if timer.cancelled.wait(0.02):
                return
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                return

    timer = threading.Thread(target=send)
    timer.cancelled = threading.Event()
    selfnorm.estimator.Trainer.start = start
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model(max_steps=10**6, patience=10**6).fit(ROWS)
    finally:
        selfnorm.estimator.Trainer.start = original
        timer.cancelled.set()
        timer.join()


def test_a_run_saves_itself_and_raises_keyboard_interrupt(tmp_path, interrupted):
    interrupted()
    recipe = find_recipe("digits-fc-snf").changed(epochs=50, validate_every=1)
    with pytest.raises(KeyboardInterrupt):
        start_run(recipe, tmp_path / "run")
    assert load(tmp_path / "run").eval() is not None and (tmp_path / "run" / "last.safetensors").exists()


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_the_kinds_of_stops(number, kind):
    error = StoppedError(number)
    assert isinstance(error, kind) and isinstance(error, StoppedError) and not isinstance(error, Exception)
    assert (error.number, str(error)) == (number, f"stopped by {signal.Signals(number).name}")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), back.number) == (type(error), number)


def test_an_uncaught_sigterm_ends_a_program_with_its_status():
    code = f"from selfnorm.train.stopping import StoppedError, signals_wait\nraise StoppedError({int(signal.SIGTERM)})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (143, b"")


def test_an_interrupt_of_the_first_fit_spoils_no_later_one():
    """Ctrl-C while torch imports what its first optimiser needs left modules that no fit could use."""
    program = """
import os, signal, sys
import numpy as np
from selfnorm import SelfNormDensity

class InterruptedImport:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo.trace_rules":
            os.kill(os.getpid(), signal.SIGINT)

x = np.random.default_rng(0).normal(size=(60, 2))
sys.meta_path.insert(0, InterruptedImport())
try:
    SelfNormDensity(max_steps=5).fit(x)
except KeyboardInterrupt:
    print("interrupted")
sys.meta_path.pop(0)
print(SelfNormDensity(max_steps=5).fit(x).score(x) < 0)
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120, preexec_fn=interruptible
    )
    assert (result.stdout, result.returncode) == ("interrupted\nTrue\n", 0), result.stderr


def interruptible():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_signal_that_waits_is_not_lost():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []
    try:
        with pytest.raises(KeyboardInterrupt), signals_wait():
            signal.raise_signal(signal.SIGINT)
            reached.append("end")
        with pytest.raises(KeyboardInterrupt), signals_wait():
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError("of something else")
        with signals_wait():
            pass
    finally:
        signal.signal(signal.SIGINT, handler)
    assert reached == ["end"]
