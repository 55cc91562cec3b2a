"""Command lines: verbs, options and settings with values that nobody would type, and outputs over files that are there."""

from typing import Any

from hypothesis import strategies as st

from fuzz.cases import Case
from fuzz.strategies_bytes import NEW_ROWS
from selfnorm.train.recipe import FLAT_KEYS

# Without "/", so that nothing outside the working folder is named.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\x00"), max_size=12)
NUMBERS = [
    "0",
    "-1",
    "1",
    "1.5",
    "nan",
    "-inf",
    "1e400",
    "9" * 30,
    "9" * 5000,
    "-" + "9" * 30,
    "2147483648",
    "18446744073709551616",
]
WORDS = [
    "",
    " ",
    "true",
    "none",
    "null",
    "0x10",
    "1_000",
    "１",
    "one\ntwo",
    "\x1b[31mred",
    "\x9b31m",
    "\x7f",
    "é",
    "日本",
    "*",
    "~",
    "a" * 300,
]
DEVICES = ["cpu", "cuda", "cuda:99", "meta", "cpu:7", "xla", "--", "-", "%s", "{x}", "[bold]x", "`x`", "$HOME"]
VALUES = st.one_of(st.sampled_from([*NUMBERS, *WORDS, *DEVICES]), TEXT)
# Of these, one that is accepted might take all memory or all day; they are drawn with values that must be refused or are small.
COSTLY = {"epochs", "layers", "blocks", "layers_per_block", "steps_per_block", "hidden", "bins", "test_samples", "probes"}
SMALL = st.sampled_from(["0", "-1", "1", "2", "1.5", "nan", "x", "", "none", "true", "\x1b[2J", "65536", "9" * 30, str(2**63)])
BATCHES = ("batch_size", "eval_batch_size")  # of one row each, a run takes a minute
LARGE = {"65536", "9" * 30, str(2**63)}
KEYS = st.one_of(st.sampled_from(sorted(FLAT_KEYS)), st.sampled_from(sorted(FLAT_KEYS.values())), TEXT)
RUN_FILES = [
    "best.safetensors",
    "last.safetensors",
    "recipe.toml",
    "metrics.jsonl",
    "result.json",
    "training_scores.npy",
    "samples.png",
]
OUTPUTS = st.one_of(
    st.sampled_from(
        ["out.csv", "out.npy", "out.parquet", "out.png", "out", "new.csv", "keep.csv", "keep.npy", "{train}", "run", "."]
    ),
    st.sampled_from([f"run/{name}" for name in RUN_FILES]),
    st.sampled_from(
        ["nowhere/out.csv", "link.csv", "./new.csv", "run/../new.csv", "out.CSV", " .csv", "\x1b[2J.csv", "a\nb.csv", "-", ""]
    ),
    TEXT.map(lambda text: text + ".csv"),
)
# Each verb's arguments that make it work, and the options it takes.
VERBS: dict[str, tuple[tuple[str, ...], dict[str, st.SearchStrategy[str] | None]]] = {
    "score": (("run", "new.csv"), {"-o": OUTPUTS, "--samples": VALUES, "--seed": VALUES, "--device": VALUES, "--json": None}),
    "sample": (
        ("run",),
        {
            "-n": st.sampled_from(["0", "1", "3", "-1", "x", "1" + "0" * 20, str(2**63)]),
            "-o": OUTPUTS,
            "--inverse": st.sampled_from(["auto", "exact", "learned", "refined", "", "EXACT", "\x1b"]),
            "--seed": VALUES,
            "--device": VALUES,
        },
    ),
    "eval": (
        ("run",),
        {"--part": VALUES, "--samples": VALUES, "--precision": VALUES, "--data": VALUES, "--device": VALUES, "--json": None},
    ),
    "doctor": (
        ("run",),
        {"--repair": None, "-o": OUTPUTS, "--examples": VALUES, "--data": VALUES, "--device": VALUES, "--json": None},
    ),
    "recipes": ((), {"--json": None}),
    "fit": (("new.csv",), {"--run": OUTPUTS, "--device": VALUES, "--on-divergence": VALUES, "--json": None, "--quiet": None}),
    "train": (
        ("moons-fc-snf",),
        {"--run": OUTPUTS, "--seed": VALUES, "--seeds": st.sampled_from(["0", "-1", "x"]), "--data": VALUES, "--resume": VALUES},
    ),
}
SMALL_RUN = ("--set", "epochs=1", "--set", "layers=1", "--run", "new")
# Calls that must succeed, with values for the options, of which any subset may be given; () for a flag.
VALID: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("score", "run", "new.csv"): {
        "-o": ("out.csv", "out.npy", "out.CSV"),
        "--samples": ("1", "3"),
        "--seed": ("0", "7"),
        "--device": ("cpu", "auto"),
    },
    ("score", "run", "new.csv", "--json"): {"--seed": ("0", "7"), "--constant-columns": ("flag", "impossible")},
    ("sample", "run"): {
        "-n": ("1", "3"),
        "-o": ("out.csv", "out.npy", "./out.csv"),
        "--inverse": ("auto", "exact", "learned", "refined"),
        "--seed": ("0", "7"),
    },
    ("eval", "run"): {"--part": ("train", "validation", "test"), "--samples": ("1", "2"), "--json": (), "--device": ("cpu",)},
    ("doctor", "run"): {"--examples": ("2", "9"), "--json": (), "--repair": (), "--device": ("cpu", "auto")},
    ("recipes",): {"--json": ()},
    ("train", "moons-fc-snf", *SMALL_RUN): {"--seed": ("0", "7"), "--quiet": (), "--device": ("cpu",)},
}
READ_AS_TABLE = (".csv", ".tsv", ".npy", ".npz", ".parquet", ".gz")


@st.composite
def settings_of_runs(draw: Any) -> list[str]:
    """Settings with odd values, of which the last keep the run short and small."""
    words: list[str] = []
    used = set()
    for _ in range(draw(st.integers(0, 2))):
        key = draw(KEYS)
        name = key.rpartition(".")[2]
        value = draw(SMALL if name in COSTLY else VALUES)
        used.add(name if value in LARGE and name != "layers" else "")
        used |= set(BATCHES) if name.endswith("batch_size") else set()
        words += ["--set", draw(st.sampled_from([f"{key}={value}", f"{key} = {value}", key, f"{key}=={value}"]))]
    small = {"epochs": 1, "layers": 1, "blocks": 1, "hidden": 2, "bins": 3, **dict.fromkeys(BATCHES, 500)}
    return words + [word for name, value in small.items() if name in used | {"epochs"} for word in ("--set", f"{name}={value}")]


@st.composite
def valid_options(draw: Any) -> Case:
    """A call that must succeed."""
    call = draw(st.sampled_from(sorted(VALID)))
    known = VALID[call]
    given = draw(st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True))
    words = [word for name in given for word in ((name, draw(st.sampled_from(known[name]))) if known[name] else (name,))]
    may_change = ("run/repaired",) if call[0] == "doctor" else ()
    return Case("options", (*call, *words), "table", FILES, NOTE, must_succeed=True, may_change=may_change)


@st.composite
def options(draw: Any) -> Case:
    """A call with any options; the run, its data, the input and the files keep.* must stay as they are."""
    if draw(st.integers(0, 5)) == 0:
        return draw(valid_options())
    if draw(st.integers(0, 3)) == 0:
        writes = draw(st.sampled_from([("score", "run", "new.csv"), ("sample", "run", "-n", "3"), ("doctor", "run", "--repair")]))
        return Case("options", (*writes, "-o", draw(OUTPUTS)), "table", FILES, NOTE)
    verb = draw(st.sampled_from(["score", "score", "sample", "sample", "eval", "doctor", "recipes", "fit", "train"]))
    arguments, known = VERBS[verb]
    words = list(arguments) if draw(st.integers(0, 5)) else [draw(VALUES) for _ in arguments]
    for name in draw(st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True)):
        value = known[name]
        words += (
            [name]
            if value is None
            else [f"{name}={draw(value)}"]
            if len(name) > 2 and draw(st.booleans())
            else [name, draw(value)]
        )
    if draw(st.integers(0, 5)) == 0:
        words.insert(
            draw(st.integers(0, len(words))),
            draw(st.sampled_from(["--nonsense", "--force", "-x", "--", "--debugg", "--help", "-"])),
        )
    if verb in ("fit", "train"):
        words += draw(settings_of_runs())
    if draw(st.integers(0, 40)) == 0:
        return Case("options", tuple(draw(st.lists(VALUES, max_size=3))), "table", FILES, NOTE)
    return Case("options", (verb, *words), "table", FILES, NOTE)


FILES: dict[str, bytes | None] = {
    "new.csv": NEW_ROWS,
    "keep.csv": b"keep,me\n1,2\n",
    "keep.npy": b"keep me",
    "keep.txt": b"keep me",
}
NOTE = f"with {', '.join(FILES)}"
