"""The table as Markdown, CSV and JSON, with the facts that let somebody else repeat it."""

from __future__ import annotations

import csv
import json
import os
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from harness import Row, with_ratios

PACKAGES = (
    "theodolite", "torch", "numpy", "scipy", "scikit-learn", "transformers",
    "curvlinops-for-pytorch", "hessian-eigenthings", "pyhessian", "nngeometry", "backpack-for-pytorch",
    "torchopt", "higher",
)  # fmt: skip

COLUMNS = {
    "item": "item",
    "work": "work",
    "who": "who",
    "gradients": "cost in gradients",
    "ratio": "ratio to ours",
    "error": "error",
    "products": "products",
    "memory": "peak memory in training steps",
    "note": "note",
}


def facts() -> dict[str, Any]:
    """Versions and machine, without names or paths."""
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def cell(name: str, value: Any) -> str:
    """A value as the table shows it."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value.replace("|", "\\|") or "-"
    if name == "error":
        return f"{value:.1e}" if value else "0"
    if name == "products":
        return f"{value:.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def markdown(rows: list[Row], legend: dict[str, str], about: dict[str, Any]) -> str:
    head = "| " + " | ".join(COLUMNS.values()) + " |\n|" + "---|" * len(COLUMNS)
    body = ["| " + " | ".join(cell(name, getattr(row, name)) for name in COLUMNS) + " |" for row in rows]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        "# Side by side",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, {about['system']}, Python {about['python']}; "
        f"{versions}." + (" QUICK RUN: sizes and rounds are cut, the numbers mean nothing." if about.get("quick") else ""),
        "",
        "A cost of 1 gradient is one forward + backward over the same data, timed in turns with the work. What `error` is:",
        "",
        *(f"- **{item}**: {text}" for item, text in legend.items()),
        "",
        head,
        *body,
        "",
    ]
    return "\n".join(lines)


def write(out: Path, rows: list[Row], legend: dict[str, str], about: dict[str, Any]) -> str:
    """Write all three files; returns the Markdown."""
    with_ratios(rows)
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(rows, legend, about)
    (out / "table.md").write_text(text)
    with (out / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([getattr(row, name) for name in COLUMNS] for row in rows)
    document = {"facts": about, "legend": legend, "rows": [asdict(row) for row in rows]}
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    return text
