"""Disturbs every verb that writes, repeats the call, and compares what it leaves with an undisturbed one, bit for bit.

    python benchmarks/faults.py [--faults 1000] [--jobs 2] [--seed 0] [--json results/faults-cpu.json]
    python benchmarks/faults.py --only 17

The faults are SIGKILL, SIGTERM and SIGINT at random moments, disks that are full, folders that cannot be written to or that
vanish, and a second process that does the same at the same time. The same call follows, as `train --resume` if there is a run,
and with --force where it had written its output. It must end with 0 and leave what an undisturbed call leaves, apart from times,
and nothing else. No call may show a traceback or leave a part of a file under a final name. Checkpoints are written after each
step. Exits with 1 if anything is wrong; --only SEED repeats one fault and shows what happened.
Twenty minutes on two cores; Linux only.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

import forked
import selfnorm
from forked import SIGNALS, Call, Ended, Fault, disturbed, random_fault
from progress import progress
from record import Cell, at_least, command, parser, record, run
from selfnorm.report.provenance import provenance

TABLE = "".join(f"{(index * 37 % 101) / 20 + index / 97:.6f},{(index * 53 % 89) / 30 - index / 71:.6f}\n" for index in range(60))
TINY = ("--set", "layers=2", "--set", "epochs=3", "--set", "batch_size=16", "--set", "validate_every=1", "--device", "cpu", "-q")
OTHER = ("--set", "seed=7")
CONTINUE = ("train", "--resume", "run", "--device", "cpu", "-q")


@dataclass(frozen=True)
class Verb:
    """A call that writes. In `args`, {table} stands for the file of a table.

    before:  what lies in the folder `run`: nothing, a finished run, or one stopped half way.
    target:  the folder that it writes to.
    other:   what a second process does otherwise; the folder then belongs to one of them.
    share:   its part of all faults, relative to the others'.
    """

    args: tuple[str, ...]
    before: str = ""
    target: str = "run"
    other: tuple[str, ...] = ()
    share: int = 10


VERBS = {
    "train": Verb(("train", "moons-fc-snf", "--set", "data={table}", *TINY, "--run", "run"), other=OTHER),
    "train --resume": Verb(CONTINUE, before="stopped"),
    "fit": Verb(("fit", "{table}", *TINY, "--run", "run"), other=OTHER),
    "compare": Verb(("compare", "moons-fc-snf", "--set", "data={table}", *TINY, "--run", "run"), share=4),
    "score": Verb(("score", "run", "{table}", "-o", "out/scores.csv"), before="finished", target="out", share=15),
    "sample": Verb(("sample", "run", "-n", "3000", "-o", "out/samples.csv"), before="finished", target="out", share=15),
    "doctor --repair": Verb(("doctor", "run", "--repair", "-o", "out/repaired.safetensors"), "finished", "out"),
}
FIRST_SECONDS = "first two seconds"  # of a process that starts afresh, ended by a signal while it imports
KINDS = {  # with their shares
    **dict.fromkeys(SIGNALS, 20),
    "full disk": 10,
    "file limit": 10,
    "read-only": 6,
    "renamed": 5,
    "deleted": 4,
    "second process": 10,
    FIRST_SECONDS: 4,
}
CODES = (0, 1, 3, 130, 143, *(-number for number in SIGNALS.values()))
# What measures this machine at this moment, and the digest of a result, which covers such values.
OF_THE_MOMENT = ("seconds", "step_seconds", "peak_memory", "provenance", "log_length", "digest")


@dataclass(frozen=True)
class Undisturbed:
    """What a call leaves, and what one with the verb's `other` leaves; how long it takes, and what it writes."""

    files: dict[str, str]
    other: dict[str, str]
    seconds: float
    events: int
    largest: int


@dataclass(frozen=True)
class Tried:
    """A fault, how the disturbed calls ended, and what was wrong, each as one line."""

    seed: int
    verb: str
    fault: str
    kind: str
    codes: tuple[int | None, ...]
    wrong: tuple[str, ...]


class Workplace:
    """A folder with the table, the runs that verbs start from, and what each verb leaves if nothing disturbs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = folder / "table.csv"
        self.table.write_text("a,b\n" + TABLE, encoding="utf-8")
        forked.prepare()
        self.runs: dict[str, Path] = {}
        self._undisturbed: dict[str, Undisturbed] = {}
        fit = VERBS["fit"]
        half = self._must(fit, self.home(fit)).events // 2
        for before, fault in (("finished", Fault()), ("stopped", Fault("SIGTERM", event=half))):
            home = self.home(fit)
            self._must(fit, home, fault)
            self.runs[before] = home / "run"

    def _must(self, verb: Verb, home: Path, fault: Fault = Fault()) -> Ended:  # noqa: B008  (frozen)
        """Makes a call that must succeed, or be stopped."""
        ended = Call(self.args(verb), home, fault).end()
        if ended.code != (143 if fault.kind else 0):
            raise RuntimeError(f"faults: expected {verb.args} to succeed, got exit status {ended.code}: {ended.stderr}")
        return ended

    def args(self, verb: Verb) -> list[str]:
        return [word.format(table=self.table) for word in verb.args]

    def home(self, verb: Verb) -> Path:
        """Returns a new working folder for a verb."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        self._complete(verb, home)
        return home

    def _complete(self, verb: Verb, home: Path) -> None:
        """Makes what a verb needs and does not make itself, where it is missing."""
        if verb.before and not (home / "run" / "recipe.toml").exists():
            shutil.rmtree(home / "run", ignore_errors=True)  # a call may have written to it while it was deleted
            shutil.copytree(self.runs[verb.before], home / "run")
        if verb.target == "out":
            (home / "out").mkdir(exist_ok=True)

    def undisturbed(self, name: str) -> Undisturbed:
        if name not in self._undisturbed:
            home = self.home(VERBS[name])
            ended = self._must(VERBS[name], home)
            largest = max(path.stat().st_size for path in (home / VERBS[name].target).iterdir())
            other: dict[str, str] = {}
            if VERBS[name].other:
                place = self.home(VERBS[name])
                Call([*self.args(VERBS[name]), *VERBS[name].other], place).end()
                other = contents(place)
            self._undisturbed[name] = Undisturbed(contents(home), other, ended.seconds, ended.events, largest)
            shutil.rmtree(home)
        return self._undisturbed[name]

    def attempt(self, seed: int, show: bool = False) -> Tried:
        """Disturbs a call and repeats it. The seed decides everything, except how fast the machine is."""
        chance = random.Random(seed)
        name = chance.choices(list(VERBS), [verb.share for verb in VERBS.values()])[0]
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        verb, whole = VERBS[name], self.undisturbed(name)
        home = self.home(verb)
        if kind == FIRST_SECONDS:
            fault = Fault(chance.choice(list(SIGNALS)), delay=chance.uniform(0, 2))
            ended = [self._started(verb, home, fault)]
        else:
            fault = random_fault(kind, chance, whole.seconds, whole.events, whole.largest)
            ended = disturbed(self.args(verb), home, fault, home / verb.target, verb.other)
        forked.wait_for_orphans()
        wrong = [what for each in ended for what in wrong_call(each, kind, verb)] + wrong_files(home)
        left = contents(home)
        expected = whole.files
        if kind == "second process" and verb.other and ended[1].code == 0 and ended[0].code != 0:
            expected = whole.other  # the second won
        if kind not in ("renamed", "deleted", "second process") and ended[0].code == 0:
            wrong += [f"exit 0, but {what}" for what in differences(expected, left)]
        again = self._repeat(verb, home)
        forked.wait_for_orphans()
        if again.code != 0:
            wrong.append(f"repeated: expected exit status 0, got {again.code}: {last_line(again.stderr)}")
        else:
            wrong += [f"repeated: {what}" for what in differences(expected, contents(home))]
        if show:
            print(f"{name}: {fault}\nin {home}\nleft: {sorted(left)}")
            for each in [*ended, again]:
                print(f"exit status {each.code} after {each.seconds:.2f} s\n{each.stdout}{each.stderr}")
        else:
            shutil.rmtree(home, ignore_errors=True)
        short = tuple(what.replace(str(home), "…") for what in wrong)
        return Tried(seed, name, f"{fault}", kind, tuple(each.code for each in ended), short)

    def _repeat(self, verb: Verb, home: Path) -> Ended:
        """Makes the same call again, as a user would: continues a run, and overwrites what the call had written."""
        self._complete(verb, home)
        trains = verb.args[0] in ("train", "fit")
        args = list(CONTINUE) if trains and (home / "run" / "recipe.toml").exists() else self.args(verb)
        ended = Call(args, home).end()
        if ended.code == 1 and "--force" in ended.stderr:
            ended = Call([*args, "--force"], home).end()
        return ended

    def _started(self, verb: Verb, home: Path, fault: Fault) -> Ended:
        """Starts a process afresh, and ends it with a signal while it imports."""
        words = [sys.executable, "-m", "selfnorm", *self.args(verb)]
        place = str(Path(selfnorm.__file__).parents[1])  # this package, wherever the working folder is
        environment = {**os.environ, "PYTHONPATH": place}
        with subprocess.Popen(
            words, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            time.sleep(fault.delay)
            process.send_signal(SIGNALS[fault.kind])
            stdout, stderr = process.communicate()
        return Ended(process.returncode, stdout, stderr, fault.delay, 0)


def wrong_call(ended: Ended, kind: str, verb: Verb) -> list[str]:
    """Returns what is wrong with how a disturbed call ended."""
    wrong = [] if ended.code in CODES else [f"expected a documented exit status, got {ended.code}: {last_line(ended.stderr)}"]
    if kind == "second process" and ended.code == 3:
        wrong.append(f"expected no divergence, got exit status 3: {last_line(ended.stdout)}")
    if "Traceback" in ended.stderr + ended.stdout:
        wrong.append(f"traceback: {last_line(ended.stderr)}")
    elif ended.code in (1, 3):
        reasons = [each for each in ended.stdout.splitlines() if each.startswith("moons-fc-snf: ")]  # below compare's table
        line = reasons[-1] if verb.args[0] == "compare" and reasons else last_line(ended.stderr)
        if (
            not all(each.startswith("selfnorm: ") for each in ended.stderr.splitlines())
            or len(line) < 12
            or "use --debug" in line
        ):
            wrong.append(f"expected lines that say what to do, got {ended.stderr.strip()[-300:]!r}")
        if kind in ("full disk", "file limit") and verb.target not in line:
            wrong.append(f"expected the file that could not be written, got {line}")
    return wrong


def wrong_files(home: Path) -> list[str]:
    """Returns which files are not whole that have their final names. The log may end within a line."""
    what_is_not_whole = import_module("fuzz.whole").what_is_not_whole
    files = [path for path in sorted(home.rglob("*")) if path.is_file() and ".part" not in path.name and path.suffix != ".jsonl"]
    reasons = {path: what_is_not_whole(path.name, path.read_bytes()) for path in files}
    return [f"not whole: {path.name}: {why}" for path, why in reasons.items() if why]


def contents(home: Path) -> dict[str, str]:
    """Returns a digest of what each file holds, apart from times."""
    files = [path for path in sorted(home.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(home)): hashlib.sha256(timeless(path)).hexdigest()[:16] for path in files}


def timeless(path: Path) -> bytes:
    """Returns what a file holds, apart from the times in it; of figures, nothing."""
    content = path.read_bytes()
    try:
        if path.suffix == ".safetensors":
            checkpoint = import_module("selfnorm.train.checkpoint").read_checkpoint(path)
            tensors = {
                name: [str(value.dtype), list(value.shape), value.contiguous().numpy().tobytes().hex()]
                for name, value in sorted(checkpoint.tensors.items())
            }
            facts = [
                asdict(checkpoint.recipe),
                checkpoint.data,
                checkpoint.columns,
                checkpoint.table and checkpoint.table.facts(),
            ]
            return json.dumps([tensors, without_times(checkpoint.progress), facts]).encode()
        if path.name == "comparison.json":
            return json.dumps([row[:4] for row in json.loads(content)["rows"]]).encode()
        if path.name in ("comparison.csv", "comparison.png", "curves.png"):
            return b""
        if path.suffix == ".json":
            return json.dumps(without_times(json.loads(content))).encode()
        if path.suffix == ".jsonl":
            return json.dumps([without_times(json.loads(line)) for line in content.splitlines()]).encode()
    except (ValueError, KeyError):
        return content
    return content


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in OF_THE_MOMENT}


def differences(expected: dict[str, str], got: dict[str, str]) -> list[str]:
    missing = [f"{name} is missing" for name in expected if name not in got]
    more = [f"{name} is left over" for name in got if name not in expected]
    return [*missing, *more, *(f"{name} differs" for name in expected if name in got and got[name] != expected[name])]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def work(seeds: Any, results: Any) -> None:
    """Tries the faults of the seeds in a queue, until it gets None."""
    forked.end_with_parent()
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(Path(folder).resolve())
        while (seed := seeds.get()) is not None:
            results.put(place.attempt(seed))


def try_all(seeds: list[int], jobs: int) -> Iterator[Tried]:
    """Yields the outcomes of faults as they end, from several processes."""
    context = multiprocessing.get_context("spawn")
    waiting, results = context.Queue(), context.Queue()
    for seed in [*seeds, *[None] * jobs]:
        waiting.put(seed)
    workers = [context.Process(target=work, args=(waiting, results)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        for _ in seeds:
            while True:
                try:
                    yield results.get(timeout=1)
                    break
                except queue.Empty:
                    if any(worker.exitcode for worker in workers) or not any(worker.is_alive() for worker in workers):
                        raise RuntimeError("faults: expected the jobs to go on, got the end of one") from None
    finally:
        for worker in workers:
            worker.terminate()


def rows_of(tried: list[Tried]) -> list[list[Cell]]:
    """Returns the counts by verb and kind of fault, and of all."""

    def row(name: str, kind: str, some: list[Tried]) -> list[Cell]:
        codes = Counter(ended_as(code) for each in some for code in each.codes)
        ends = [codes[name] for name in ("finished", "error", "signal")]
        return [name, kind, len(some), *ends, sum(bool(each.wrong) for each in some)]

    pairs = sorted({(each.verb, each.kind) for each in tried})
    rows = [row(verb, kind, [each for each in tried if (each.verb, each.kind) == (verb, kind)]) for verb, kind in pairs]
    return [*rows, row("all", "", tried)]


def ended_as(code: int | None) -> str:
    return "finished" if code == 0 else "error" if code in (1, 3) else "signal"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--faults", type=at_least(1), default=1000)
    options.add_argument("--jobs", type=at_least(1), default=2, help="faults that are tried at the same time")
    options.add_argument("--seed", type=int, default=0, help="of the random faults")
    options.add_argument("--only", type=int, metavar="SEED", help="try the fault of this seed, and show it")
    chosen = options.parse_args()
    if chosen.only is not None:
        found = Workplace(Path(tempfile.mkdtemp())).attempt(chosen.only, show=True)
        sys.exit("\n".join(found.wrong) or 0)
    tried: list[Tried] = []
    began = time.monotonic()
    with progress(chosen.faults) as advance:
        for each in try_all([1_000_000 * chosen.seed + index for index in range(chosen.faults)], chosen.jobs):
            tried.append(each)
            if each.wrong:
                call = f"{each.verb}, {each.fault}, exit status {each.codes}"
                print(f"\n--only {each.seed}: {call}", *each.wrong, sep="\n  ", flush=True)
            advance(sum(bool(other.wrong) for other in tried))
    wrong = [each for each in tried if each.wrong]
    record(
        chosen.json,
        title=f"{len(tried)} faults",
        about=(
            "Calls that were disturbed, by verb and fault: how they ended, and how many were wrong. The same call followed each "
            "time, as --resume if there was a run. It is right if that ends with 0 and leaves what an undisturbed call leaves, "
            "bit for bit apart from times, and nothing else, and if neither showed a traceback or left a part of a file under "
            "a final name. With a second process, both are counted."
        ),
        columns=["verb", "fault", "faults", "finished", "error", "signal", "wrong"],
        rows=rows_of(tried),
        provenance=provenance(command=command()) | {"seconds": f"{time.monotonic() - began:.0f}"},
        metrics=[asdict(each) for each in sorted(wrong, key=lambda each: each.seed)],
    )
    if wrong:
        sys.exit(f"faults: expected none to be wrong, got {len(wrong)} of {len(tried)}")


if __name__ == "__main__":
    run(main)
