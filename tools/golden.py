"""Golden results: what every experiment at tiny size and five surveys say, kept before a big step and compared after it.

    python tools/golden.py record FOLDER [PATTERN...]    before anything moves
    python tools/golden.py compare FOLDER [PATTERN...]   after each part of the step; exit code 1 if something differs

Only public calls are used (`th.experiments`, `theodolite survey --json`), so the same script runs on the code of both sides.
Each experiment and each survey runs on one thread. Numbers agree to 1e-6 relative, or to 1e-9 of the largest number of the same
column, where threads and processors order sums differently; everything else is equal. Columns that only the new side has are
listed, not counted as differences. PATTERN is a glob of experiment ids, or `survey/NAME`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RELATIVE, OF_COLUMN = 1e-6, 1e-9
HERE = Path(__file__).parent
#: Model, data and further options of the surveys; the functions stand in golden_models.py beside this file.
SURVEYS = {
    "digits-mlp": ["--train", "60", "--lr", "0.1"],
    "cnn-batchnorm": [
        "--model",
        "golden_models:cnn",
        "--data",
        "golden_models:images",
        "--lr",
        "0.05",
        "--optimizer",
        "momentum",
    ],
    "tiny-gpt2": ["--model", "golden_models:gpt2", "--data", "golden_models:tokens", "--optimizer", "adamw", "--lr", "0.001"],
    "tiny-bert": ["--model", "golden_models:bert", "--data", "golden_models:masked_tokens", "--lr", "0.01"],
    "regression-mlp": ["--model", "golden_models:regression", "--data", "golden_models:table", "--loss", "mse"],
}
#: What names a moment, a machine or a price in seconds: never equal twice.
UNSTEADY = (
    "seconds",
    "took",
    "gradients",
    "page",
    "time",
    "memory",
    "bytes",
    "budget",
    "version",
    "provenance",
    "git",
    "created",
    "price",
    "host",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare", "one"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--new", type=Path, help="where the new results go; default FOLDER/new")
    options = parser.parse_args()
    if options.action == "one":
        write(options.folder, measured(options.patterns[0]))
        return 0
    selected = [name for name in all_names() if any(fnmatch.fnmatchcase(name, p) for p in options.patterns)]
    if options.action == "record":
        return record(options.folder, selected, options.workers)
    return compare(options.folder, options.new or options.folder / "new", selected, options.workers)


def all_names() -> list[str]:
    import theodolite as th

    return [*(f"survey/{name}" for name in SURVEYS), *th.experiments.names()]


def place(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '+')}.json"


def record(folder: Path, names: list[str], workers: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not place(folder, name).exists()]
    failed = [name for name, error in in_processes(folder, missing, workers) if error]
    print(f"{len(names) - len(failed)} of {len(names)} recorded in {folder}.", *failed, sep="\n  ")
    return int(bool(failed))


def compare(folder: Path, fresh: Path, names: list[str], workers: int) -> int:
    """New results are kept in `fresh`, so that a difference can be looked at."""
    recorded = [name for name in names if place(folder, name).exists()]
    fresh.mkdir(parents=True, exist_ok=True)
    different = 0
    for name, error in in_processes(fresh, recorded, workers):
        found = [error] if error else list(differences(*(json.loads(place(f, name).read_text()) for f in (folder, fresh))))
        different += bool(found)
        if found:
            print(f"{name}: {len(found)} differences", *found[:8], sep="\n    ", flush=True)
    lost = [name for name in sorted(p.stem.replace("+", "/") for p in folder.glob("*.json")) if name not in all_names()]
    if lost:
        print("No longer there:", *lost, sep="\n    ")
    print(f"{len(recorded) - different} of {len(recorded)} equal.")
    return int(bool(different or lost))


def in_processes(folder: Path, names: list[str], workers: int) -> Iterator[tuple[str, str]]:
    """Each result in a process of its own: (name, "" or what went wrong), as they finish in order."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT"}

    def one(name: str) -> tuple[str, str]:
        command = [sys.executable, str(Path(__file__)), "one", str(place(folder, name)), name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return name, "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, names)


def measured(name: str) -> dict[str, Any]:
    return survey(name.removeprefix("survey/")) if name.startswith("survey/") else experiment(name)


def experiment(name: str) -> dict[str, Any]:
    import theodolite as th

    run = th.experiments.run(name, size="tiny")
    verdicts = [
        {"text": v.text, "state": v.state.value, "measured": v.measured, "error": v.error, "expected": v.expected, "rule": v.rule}
        for v in run.verdicts
    ]
    return {"title": run.experiment.title, "rows": run.rows, "verdicts": verdicts, "failures": [f.error for f in run.failures]}


def survey(name: str) -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as out:
        start = [sys.executable, "-c", "from theodolite.cli import main; main()", "survey"]
        command = [*start, *SURVEYS[name], "--json", "--budget", "none", "--out", out]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(done.stderr.strip()[-500:])
    return {"survey": json.loads(done.stdout), "exit": done.returncode}


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, default=plain, indent=0))


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


# Comparing


def differences(old: Any, new: Any) -> Iterator[str]:
    """What differs, each as one line that names the place."""
    scales: dict[str, float] = {}
    each_number(old, "", lambda place, v: scales.__setitem__(place, max(scales.get(place, 0.0), abs(v))))
    yield from _differences(old, new, "", "", scales)


def _differences(old: Any, new: Any, place: str, column: str, scales: dict[str, float]) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            if any(word in key.lower() for word in UNSTEADY):
                continue
            if key not in new:
                yield f"{place}.{key} is missing"
            else:
                yield from _differences(old[key], new[key], f"{place}.{key}", f"{column}.{key}", scales)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{place}: {len(old)} entries became {len(new)}"
        for i, (a, b) in enumerate(zip(old, new, strict=False)):
            yield from _differences(a, b, f"{place}[{i}]", column, scales)
    elif is_number(old) and is_number(new):
        if not close(float(old), float(new), scales.get(column, 0.0)):
            yield f"{place}: {old!r} became {new!r}"
    elif old != new:
        yield f"{place}: {str(old)[:120]!r} became {str(new)[:120]!r}"


def each_number(value: Any, place: str, visit: Callable[[str, float], None]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            each_number(inner, f"{place}.{key}", visit)
    elif isinstance(value, list):
        for inner in value:
            each_number(inner, place, visit)
    elif is_number(value) and math.isfinite(value):
        visit(place, float(value))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def close(a: float, b: float, scale: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a == b or (math.isnan(a) and math.isnan(b))
    return abs(a - b) <= max(RELATIVE * max(abs(a), abs(b)), OF_COLUMN * scale)


if __name__ == "__main__":
    sys.exit(main())
