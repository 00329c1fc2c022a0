"""What `theodolite dictionary` keeps in its folder, so that a run can be gone on with, and what it leaves for others."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.cli.output import plain
from theodolite.data.readers import read_arrays
from theodolite.files import write_whole
from theodolite.instruments.dictionary_study import DictionaryPlan, DictionaryStudy, Learner, encode
from theodolite.measures.dictionary import DictionaryChoice, LearnerState, SparseCodes
from theodolite.measures.dictionary.learning import Objective
from theodolite.results import Outcome, Row

Kept = tuple[dict[Objective, Learner], DictionaryChoice | None]

FORMAT = "theodolite dictionary"
_STATE = ("components", "first", "second")
_FREE = ("epochs", "objectives")  # what a run that goes on may change


@dataclass(frozen=True)
class Folder:
    """The folder of a run: `run.json` says what it is, `learner-OBJECTIVE.npz` where learning stands."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    def learner(self, objective: str) -> Path:
        return self.path / f"learner-{objective}.npz"

    def refuse_existing(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out must be a folder. {self.path} is a file.")
        if self.manifest.exists():
            raise ValueError(
                f"{self.path} already holds a dictionary. Go on with it by --resume, do it anew by --fresh, or choose another "
                "folder."
            )

    def begin(self, plan: DictionaryPlan, data: NDArray[Any]) -> Kept:
        """Start anew: what an earlier run has kept is forgotten."""
        for old in self.path.glob("learner-*.npz"):
            old.unlink()
        self._write({"format": FORMAT, "version": 1, "data": digest(data), "plan": _plain_plan(plan), "choice": None})
        return {}, None

    def take_up(self, plan: DictionaryPlan, data: NDArray[Any]) -> Kept:
        """What a run has kept, for the same data and the same plan; only passes and objectives may differ."""
        if not self.manifest.exists():
            return self.begin(plan, data)
        kept = self._read()
        if kept["data"] != digest(data):
            raise ValueError(f"{self.path} holds a dictionary of other data. Choose another --out, or --fresh.")
        wanted = _plain_plan(plan)
        for name, value in wanted.items():
            if kept["plan"].get(name) != value:
                raise ValueError(
                    f"{self.path} was learned with {name.replace('_', ' ')} {kept['plan'].get(name)}, now it is {value}. "
                    "Give the same settings with --resume, or --fresh."
                )
        files = {objective: self.learner(objective) for objective in plan.objectives}
        learned = {objective: _read_learner(file, data.shape[1]) for objective, file in files.items() if file.is_file()}
        return learned, _choice_of(kept["choice"])

    def keep(self, objective: str, learner: Learner) -> None:
        arrays = {name: getattr(learner.state, name).numpy() for name in _STATE}
        counts = {"step": learner.state.step, "epoch": learner.state.epoch}
        write_whole(self.learner(objective), _npz(**arrays, **counts, losses=learner.losses.numpy()))

    def keep_choice(self, choice: DictionaryChoice) -> None:
        names = ("n_components", "sparsity", "simplest_components", "simplest_sparsity", "table", "seed")
        self._write(self._read() | {"choice": {name: getattr(choice, name) for name in names}})

    def write_results(self, study: DictionaryStudy, plan: DictionaryPlan, signals: NDArray[Any], *, codes: bool) -> list[Path]:
        """Atoms, tables and, where wanted, codes; the files written."""
        written = []
        for objective, judged in study.judged.items():
            name = "components.npy" if objective == study.main else f"components-{objective}.npy"
            written.append(self._put(name, _npy(judged.learner.components)))
        if study.offset is not None:
            written.append(self._put("offset.npy", _npy(study.offset)))
        atoms = [{"objective": name, **row} for name, judged in study.judged.items() for row in judged.usage.rows()]
        tables: dict[str, Sequence[Row]] = {"rows.csv": study.rows(), "atoms.csv": atoms, "learning.csv": study.learning_rows()}
        if study.choice is not None:
            tables["choice.csv"] = study.choice.rows()
        written += [self._put(name, _csv(rows)) for name, rows in tables.items()]
        if codes:
            written.append(self._put("codes.npz", _sparse(encode(signals, study, plan), len(study.components))))
        return written

    def _put(self, name: str, content: bytes) -> Path:
        write_whole(self.path / name, content)
        return self.path / name

    def _read(self) -> dict[str, Any]:
        try:
            kept: dict[str, Any] = json.loads(self.manifest.read_text(encoding="utf-8"))
            if kept["format"] != FORMAT:
                raise KeyError(kept["format"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.manifest} is not what a dictionary run leaves; --fresh starts anew.") from error
        return kept

    def _write(self, content: Mapping[str, Any]) -> None:
        write_whole(self.manifest, json.dumps(plain(dict(content)), indent=1).encode())


def digest(data: NDArray[Any]) -> str:
    """What tells one matrix from another."""
    return hashlib.sha256(f"{data.dtype}{data.shape}".encode() + np.ascontiguousarray(data).tobytes()).hexdigest()


def _plain_plan(plan: DictionaryPlan) -> dict[str, Any]:
    """As JSON gives it back."""
    fixed = {name: value for name, value in asdict(plan).items() if name not in _FREE}
    found: dict[str, Any] = json.loads(json.dumps(plain(fixed)))
    return found


def _choice_of(kept: Mapping[str, Any] | None) -> DictionaryChoice | None:
    if kept is None:
        return None
    return DictionaryChoice(**{**kept, "table": tuple(kept["table"])}, outcome=Outcome.ESTIMATED)


def _read_learner(path: Path, dim: int) -> Learner:
    arrays = read_arrays(path)
    wanted = {*_STATE, "step", "epoch", "losses"}
    shapes = {arrays[name].shape for name in _STATE if name in arrays}
    if set(arrays) != wanted or len(shapes) != 1 or len(shape := next(iter(shapes))) != 3 or shape[2] != dim:
        raise ValueError(f"{path} is not what a dictionary run leaves; --fresh starts anew.")
    tensors = {name: torch.from_numpy(arrays[name]) for name in _STATE}
    state = LearnerState(**tensors, step=int(arrays["step"]), epoch=int(arrays["epoch"]))
    return Learner(state, torch.from_numpy(arrays["losses"]))


def _npy(values: Tensor) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values.numpy(), allow_pickle=False)
    return buffer.getvalue()


def _npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _csv(rows: Sequence[Row]) -> bytes:
    import pandas

    return pandas.DataFrame(rows).to_csv(index=False).encode()


def _sparse(codes: SparseCodes | Tensor, atoms: int) -> bytes:
    """Codes (n, atoms) as scipy's sparse matrices are kept: `scipy.sparse.load_npz` reads them."""
    from scipy import sparse

    if isinstance(codes, Tensor):
        matrix = sparse.csr_matrix(codes.numpy())
    else:
        taken = codes.support >= 0
        rows = torch.arange(len(taken))[:, None].expand_as(taken)[taken]
        entries = (codes.values[taken].numpy(), (rows.numpy(), codes.support[taken].numpy()))
        matrix = sparse.csr_matrix(entries, shape=(len(taken), atoms))
    buffer = io.BytesIO()
    sparse.save_npz(buffer, matrix)
    return buffer.getvalue()
