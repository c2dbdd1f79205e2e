"""The training loop: one function that starts, goes on, stops and never loses a step."""

import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import exp, isfinite
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from contextready.analysis.perplexity import parallel_scores, sequential_score
from contextready.data.batches import Batches, Windows
from contextready.data.shards import SPLITS, Data
from contextready.device import find_device, multiplies_bf16
from contextready.errors import ContextReadyError
from contextready.files import locked, write_json
from contextready.model.accounting import account
from contextready.model.build import build_model
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.train import checkpoint as checkpoints
from contextready.train.config import RunConfig, check_same_run
from contextready.train.cost import sequence_macs
from contextready.train.metrics import Metrics, Record
from contextready.train.objective import Objective
from contextready.train.schedule import learning_rate, passes_of_step


class Display(Protocol):
    """What shows a run to a person."""

    def start(self, config: RunConfig, step: int, note: str) -> None:
        """The run begins at this step."""

    def update(self, record: Record) -> None:
        """A step was made, or a validation."""

    def stop(self) -> None:
        """The run ends."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: Path
    checkpoint: Path
    step: int
    val_loss: float | None
    """The newest validation of this process, if there was one."""
    stopped_by: int | None
    """The signal that asked it to stop before its last step, if one did."""


def train(config: RunConfig, display: Display | None = None) -> Result:
    """Train until the last step, from the newest checkpoint of the run if there is one."""
    with locked(Path(config.train.out) / ".lock", f"training in {config.train.out}"), Interrupts() as interrupts:
        return Trainer(config, display).run(interrupts)


class Trainer:
    """A run in memory: model, optimizer, data, and where it stands."""

    def __init__(self, config: RunConfig, display: Display | None = None) -> None:
        self.config, self.display = config, display
        t = config.train
        self.folder = Path(t.out)
        self.data = Data(Path(t.data), SPLITS if t.verify_data else ())
        self.data.tokenizer()
        if self.data.vocab_size > config.model.vocab_size:
            raise ContextReadyError(
                f"The data {t.data} has {self.data.vocab_size:,} kinds of tokens, more than "
                f"vocab_size={config.model.vocab_size}; raise it or use the data's own by leaving it out."
            )
        self.batches = Batches(self.data.row("train"), t.block_size, t.seed)
        self.validation = Windows(self.data.row("val"), t.block_size, "validation")
        self.account = account(config.model)
        self.macs = cache(partial(sequence_macs, self.account, t))
        self.device = find_device(t.device)

        torch.manual_seed(t.seed)
        self.model = build_model(config.model).to(self.device)
        self.optimizer = make_optimizer(self.model, config)
        self.objective = Objective(
            self.model,
            t.compile,
            t.checkpoint_passes,
            t.gradient,
            t.truncated_passes,
            t.adjoint_steps,
            t.adjoint_tolerance,
            self._autocast,
        )
        self.progress = self._begin()
        # A run goes on in the precision it began with, even where "auto" would choose another.
        self.bf16 = self.progress.precision == "bf16"
        write_json(self.folder / "config.json", config.as_dict())

    def _begin(self) -> checkpoints.Progress:
        """Start at the newest checkpoint of this run, or at the weights asked for, or afresh."""
        t = self.config.train
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoints.clear_leftovers(self.folder)
        newest, origin = checkpoints.newest_checkpoint(self.folder), t.init_from
        if newest is not None:
            saved = checkpoints.open_checkpoint(newest)
            check_same_run(saved.config, self.config, str(newest))
            if saved.progress.data_identity != self.data.identity:
                raise ContextReadyError(
                    f"{newest} was trained on other data than {self.data.folder}; give the same, or another out=."
                )
            return checkpoints.restore(saved, self.model, self.optimizer, self.device)
        if origin is not None:
            load_origin(self.model, self.config, checkpoints.open_checkpoint(Path(origin)), self.data)
        bf16 = t.precision == "bf16" or (
            t.precision == "auto" and t.gradient != "bptt" and multiplies_bf16(self.device)
        )
        return checkpoints.Progress(
            precision="bf16" if bf16 else "fp32",
            data_identity=self.data.identity,
            tokenizer_sha256=self.data.tokenizer_sha256,
        )

    def run(self, interrupts: "Interrupts") -> Result:
        """Make the steps that are left."""
        if self.display is not None:
            self.display.start(self.config, self.progress.step, self._describe())
        try:
            saved = checkpoints.newest_checkpoint(self.folder)
            metrics = Metrics(self.folder, self.config, -1 if saved is None else self.progress.step)
            try:
                return self._run(interrupts, metrics, saved)
            finally:
                metrics.close()
        finally:
            if self.display is not None:
                self.display.stop()

    def _run(self, interrupts: "Interrupts", metrics: Metrics, saved: Path | None) -> Result:
        t, p = self.config.train, self.progress
        val_loss = self._validate(metrics) if saved is None else None
        while p.step < t.steps and interrupts.received is None:
            record = self.step(saved)
            last = p.step == t.steps
            if p.step % t.log_every == 0 or last:
                metrics.add(record)
            if self.display is not None:
                self.display.update(record)
            best = p.best_step
            if p.step % t.eval_every == 0 or last:
                val_loss = self._validate(metrics)
            if p.step % t.save_every == 0 or last or p.best_step != best:
                saved = self._save(metrics, saved)
        if saved != checkpoints.step_folder(self.folder, p.step):
            saved = self._save(metrics, saved)
        assert saved is not None
        return Result(self.folder, saved, p.step, val_loss, interrupts.received if p.step < t.steps else None)

    def step(self, last_checkpoint: Path | None = None) -> Record:
        """One update. A loss or gradient that is not finite stops the run before it touches the weights."""
        t, p = self.config.train, self.progress
        began = time.perf_counter()
        passes, rate = passes_of_step(t, p.step), learning_rate(t, p.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses, residual = [], None
        measure = (p.step + 1) % t.log_every == 0 or p.step + 1 == t.steps
        for part in range(t.accumulate):
            inputs_BT, targets_BT = self.batches.read(p.sequences + part * t.batch_size, t.batch_size)
            loss = self.objective.backward(
                inputs_BT.to(self.device), targets_BT.to(self.device), passes, 1.0 / t.accumulate, measure
            )
            losses.append(loss.mean)
            p.macs += t.batch_size * self.macs(passes, loss.adjoint_steps)
            residual = loss.residual
        total = float(torch.stack(losses).mean())
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), t.clip))
        if not isfinite(total) or not isfinite(norm):
            what = f"the loss is {total}" if not isfinite(total) else f"the gradient's norm is {norm}"
            raise self._diverged(what, "training stopped before the update", last_checkpoint)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        p.step += 1
        p.sequences += t.sequences_per_step
        p.seconds += time.perf_counter() - began
        return self._standing() | {
            "loss": total,
            "lr": rate,
            "grad_norm": norm,
            "passes": passes,
            "residual": residual,
        }

    def _validate(self, metrics: Metrics) -> float:
        """Validation loss at K passes, or streamed if training is, in full precision; remembers the best."""
        t, p = self.config.train, self.progress
        windows = None if t.eval_tokens is None else max(1, t.eval_tokens // t.block_size)
        self.model.eval()
        if t.passes is None:
            assert isinstance(self.model, ContextReady)
            score = sequential_score(self.model, self.validation, windows)
        else:
            score = parallel_scores(self.model, self.validation, [t.passes], windows)[t.passes]
        self.model.train()
        if isfinite(score.loss) and p.step > 0 and (p.best_loss is None or score.loss < p.best_loss):
            p.best_step, p.best_loss = p.step, score.loss
        record = self._standing() | {
            "val_loss": score.loss,
            "val_loss_error": score.loss_error,
            "val_perplexity": exp(min(score.loss, 700.0)),
        }
        metrics.add(record)
        if self.display is not None:
            self.display.update(record)
        return score.loss

    def _save(self, metrics: Metrics, last_checkpoint: Path | None) -> Path:
        """Write a checkpoint, unless the last update has left the weights not finite."""
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise self._diverged("a weight is not finite", "nothing was saved", last_checkpoint)
        metrics.sync()
        return checkpoints.save_checkpoint(
            self.folder,
            self.config.as_dict(),
            self.progress,
            self.model,
            self.optimizer,
            self.device,
            self.data.folder,
            self.config.train.keep,
        )

    def _diverged(self, what: str, done: str, last_checkpoint: Path | None) -> ContextReadyError:
        good = "no checkpoint was written yet" if last_checkpoint is None else f"the last good one is {last_checkpoint}"
        return ContextReadyError(
            f"At step {self.progress.step} {what}: {done} and {good}; try a lower lr, more warmup or precision=fp32."
        )

    def _standing(self) -> Record:
        p = self.progress
        tokens = p.sequences * self.config.train.block_size
        return {"step": p.step, "tokens": tokens, "seconds": round(p.seconds, 3), "macs": p.macs}

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _describe(self) -> str:
        kind = "transformer" if self.config.model.correction is None else "context-ready"
        return f"{self.account.parameters:,} parameters, {kind}, {self.device}, {'bf16' if self.bf16 else 'fp32'}"


class Interrupts:
    """Turn the first SIGTERM or Ctrl-C into a wish to stop after the step; the second acts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *_: object) -> None:
        self._restore()


def load_origin(
    model: Transformer | ContextReady, config: RunConfig, origin: checkpoints.Checkpoint, data: Data
) -> None:
    """Start from the weights of a checkpoint: the whole model, or its blocks where the origin is a transformer."""
    for key in ("heads", "window", "rope_base"):
        # These change what the weights mean without changing their shapes.
        theirs, ours = getattr(origin.model_config, key), getattr(config.model, key)
        if theirs != ours:
            raise ContextReadyError(f"{origin.folder} was trained with {key}={theirs}, not {ours}; set {key}={theirs}.")
    if origin.progress.tokenizer_sha256 != data.tokenizer_sha256:
        raise ContextReadyError(
            f"{origin.folder} was trained with another tokenizer than the data {data.folder}; prepare the data with "
            f"crt data prepare --tokenizer {origin.folder}."
        )
    converts = isinstance(model, ContextReady) and origin.model_config.correction is None
    target = model.backbone if converts and isinstance(model, ContextReady) else model
    assert isinstance(target, nn.Module)
    checkpoints.load_weights(target, origin.tensors("model"), origin.folder)


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """AdamW, fused; matrices decay, vectors do not."""
    t = config.train
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": t.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).device.type in ("cpu", "cuda", "mps")
    return torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), fused=fused)
