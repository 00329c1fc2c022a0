"""Measure theodolite and its peers on the same work, in one run: `python benchmarks/run.py --out benchmarks/results`."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import items_anchors
import items_bounds
import items_dictionary
import items_eigenpairs
import items_estimates
import items_features
import items_fleet
import items_growing
import items_hugging_face
import items_kernel
import items_layers
import items_monitor
import items_products
import items_stepsize
import items_structure
import items_survey
import items_sweep
from harness import Row, Settings, explain
from quiet import Patience
from tables import cell, facts, write

ITEMS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "product": items_products.hessian_product,
    "block": items_products.eight_products,
    "lenet": items_eigenpairs.lenet5_eigenpairs,
    "dense": items_eigenpairs.dense_eigenpairs,
    "copies": items_eigenpairs.multiplicities,
    "batches": items_eigenpairs.uneven_batches,
    "density": items_estimates.density,
    "trace": items_estimates.trace,
    "layers": items_layers.layer_blocks,
    "ggn": items_eigenpairs.gauss_newton,
    "hf": items_hugging_face.hugging_face,
    "layernorm": items_products.layernorm,
    "warm": items_eigenpairs.warm_start,
    "factors": items_structure.factors,
    "structure": items_structure.structure,
    "kernel": items_kernel.kernel,
    "twins": items_kernel.twins,
    "agop": items_features.outer_product,
    "monitor": items_monitor.monitoring,
    "fleet": items_fleet.fleet,
    "fleet-memory": items_fleet.fleet_memory,
    "omp": items_dictionary.pursuit,
    "dictionary": items_dictionary.training,
    "anchors": items_anchors.probing,
    "bound-steps": items_bounds.bound_steps,
    "bound-draws": items_bounds.bound_draws,
    "meta-steps": items_stepsize.meta_steps,
    "meta-memory": items_stepsize.meta_memory,
    "grow-time": items_growing.grow_time,
    "grow-memory": items_growing.grow_memory,
    "grow-trial": items_growing.grow_trial,
    "grow-prune": items_growing.grow_prune,
    "estimate": items_survey.estimates,
    "budget": items_survey.budgets,
    "help": items_survey.help_time,
    "sweep": items_sweep.sweep,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the three tables")
    parser.add_argument("--items", nargs="+", choices=ITEMS, default=list(ITEMS), help="only these")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: tries the harness, gives no numbers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait in all for other processes to end")
    return parser.parse_args()


def quiet_peers() -> None:
    """Warnings of other libraries would drown the table."""
    warnings.filterwarnings("ignore", message=".*create_graph=True will create a reference cycle.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def run_item(name: str, settings: Settings) -> Iterator[Row]:
    """The rows of one item; if the item itself breaks, that too is a row."""
    try:
        yield from ITEMS[name](settings)
    except Exception as error:  # the other items go on
        yield Row(name, "the benchmark itself", "-", note=f"FAILED {explain(error)}", details={"broken": True})


def show(row: Row, seconds: float) -> None:
    numbers = " ".join(
        f"{label} {cell(name, value)}"
        for name, label in (("gradients", "cost"), ("error", "error"), ("products", "products"), ("memory", "memory"))
        if (value := getattr(row, name)) is not None
    )
    print(f"[{seconds:6.1f} s] {row.item} | {row.work} | {row.who}: {numbers} {row.note}", flush=True)


def main() -> int:
    options = arguments()
    torch.set_num_threads(options.threads)
    quiet_peers()
    patience = Patience(0.0 if options.quick else options.patience)
    settings = Settings(options.quick, patience)
    about = {**facts(), "quick": options.quick}
    rows: list[Row] = []
    legend: dict[str, str] = {}
    began = time.perf_counter()
    text = ""
    for name in options.items:
        for row in run_item(name, settings):
            rows.append(row)
            show(row, time.perf_counter() - began)
            legend[name] = " ".join((ITEMS[name].__doc__ or "").split())
        about["seconds"] = round(time.perf_counter() - began, 1)
        about["seconds_waited"] = round(patience.waited, 1)
        text = write(options.out, rows, legend, about)  # after each item: a run that is stopped keeps what it has
    print(text)
    return 1 if any(row.details.get("broken") for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
