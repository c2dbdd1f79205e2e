"""The training loop, which starts or resumes a run and saves it when it is interrupted."""

import signal
import threading
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from contextready.device import find_device, means_bf16
from contextready.errors import ContextReadyError
from contextready.files import check_name, locked_folder, write_json
from contextready.model.config import MEANINGS
from contextready.model.context_ready import ContextReady
from contextready.runs import checkpoint as checkpoints
from contextready.runs.config import RunConfig
from contextready.runs.metrics import Metrics, Record
from contextready.runs.models import cost_of, start_model
from contextready.runs.run_checks import check_for_team, check_run_memory, check_same_run
from contextready.train.cost import sequence_macs
from contextready.train.objective import Objective
from contextready.train.saving import restore, save_checkpoint
from contextready.train.schedule import learning_rate, passes_of_step
from contextready.train.source import Source, open_source
from contextready.train.team import Team, joined, local_part, whole_tensor


class Display(Protocol):
    """Shows the progress of a run."""

    def start(self, config: RunConfig, step: int, note: str) -> None:
        """Called when the run starts or resumes at this step."""

    def update(self, record: Record) -> None:
        """Called after each step and after each validation."""

    def stop(self) -> None:
        """Called when the run ends."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: Path
    checkpoint: Path
    step: int
    val_loss: float | None
    """The newest validation loss since the run was started or resumed, if there was a validation."""
    speaks: bool
    """Whether this process should print the result."""
    stopped_by: int | None
    """The signal that interrupted the run, if one did."""


def train(config: RunConfig, display: Display | None = None) -> Result:
    """Train until the last step. If the run has checkpoints, it resumes from the newest one."""
    with joined(config.train.device) as team, Interrupts() as interrupts:
        check_name(Path(config.train.out))
        lock = locked_folder(Path(config.train.out), f"training in {config.train.out}")
        with ExitStack() as held:
            team.let_first(lambda: held.enter_context(lock))
            return Trainer(config, display, team).run(interrupts)


class Trainer:
    """A run in memory: its model, optimizer, data and progress."""

    def __init__(self, config: RunConfig, display: Display | None = None, team: Team | None = None) -> None:
        self.team = team or Team(find_device(config.train.device))
        self.config, self.display = config, display if self.team.is_first else None
        t = config.train
        self.team.check_same(config.as_dict())
        check_for_team(config, self.team.size)
        check_run_memory(config, self.team.size, self.team.device.type == "cpu")
        self.folder = Path(t.out)
        self.source = open_source(config, self.team)
        self.device = self.team.device

        newest = self._newest()
        # Everything that can be wrong with a checkpoint is found before a model is built.
        saved = None if newest is None else self._open(newest)
        torch.manual_seed(t.seed)
        self.model = start_model(config.model, None if saved is None else saved.described).to(self.device)
        self.account = cost_of(config.model, self.model)
        self.macs = cache(partial(sequence_macs, self.account, t))
        if newest is None and t.init_from is not None:
            load_origin(self.model, config, checkpoints.open_checkpoint(Path(t.init_from)), self.source)
        self.objective = Objective.for_run(self.model, t, self._autocast)
        some_unused = t.pass_schedule is not None and t.pass_schedule.least == 1
        self.wrapped = self.team.wrap(self.objective, t.parallel, some_unused and self.model.is_recurrent)
        # Created after wrapping, because sharding replaces the parameters.
        self.optimizer = make_optimizer(self.model, config)
        if not self.team.is_first:
            self.team.seed(t.seed)
        self.progress = self._start() if saved is None else restore(saved, self.model, self.optimizer, self.team)
        # A resumed run keeps the precision that it began with, even if "auto" would now choose another.
        self.bf16 = self.progress.precision == "bf16"
        if self.team.is_first:
            write_json(self.folder / "config.json", config.as_dict())

    def _newest(self) -> Path | None:
        """Return the newest checkpoint of this run, which must be the same for every process."""
        if self.team.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoints.clear_leftovers(self.folder)
        self.team.wait()
        newest = checkpoints.newest_checkpoint(self.folder)
        if len(set(self.team.gather((newest, self.source.identity)))) > 1:
            raise ContextReadyError(
                f"The processes see different checkpoints in {self.folder} or different data in {self.source.name}; "
                "both must be on a disk that all processes share."
            )
        return newest

    def _open(self, newest: Path) -> checkpoints.Checkpoint:
        """Open the checkpoint to resume from, and check that it belongs to this run."""
        self.team.let_first(lambda: checkpoints.open_checkpoint(newest))
        saved = checkpoints.open_checkpoint(newest, verify=False)
        check_same_run(saved.config, self.config, str(newest))
        if saved.progress.data_identity != self.source.identity:
            raise ContextReadyError(
                f"{newest} was trained on other data than {self.source.name}; set data= to the original data, or "
                "choose another out=."
            )
        if not saved.sharded:
            saved.check_weights()
        return saved

    def _start(self) -> checkpoints.Progress:
        """Return the progress of a new run."""
        t = self.config.train
        bf16 = t.gradient != "bptt" and means_bf16(t.precision, self.device)
        return checkpoints.Progress(
            precision="bf16" if bf16 else "fp32",
            data_identity=self.source.identity,
            tokenizer_sha256=self.source.tokenizer_sha256,
        )

    def run(self, interrupts: "Interrupts") -> Result:
        """Make the remaining steps."""
        if self.display is not None:
            self.display.start(self.config, self.progress.step, self._describe())
        try:
            saved = checkpoints.newest_checkpoint(self.folder)
            start = -1 if saved is None else self.progress.step
            metrics = Metrics(self.folder, self.config, start) if self.team.is_first else None
            try:
                return self._run(interrupts, metrics, saved)
            finally:
                if metrics is not None:
                    metrics.close()
        finally:
            if self.display is not None:
                self.display.stop()

    def _run(self, interrupts: "Interrupts", metrics: Metrics | None, saved: Path | None) -> Result:
        t, p = self.config.train, self.progress
        val_loss = self._validate(metrics) if saved is None else None
        signal_number = None
        while p.step < t.steps and not p.solved and (signal_number := self._asked_to_stop(interrupts)) is None:
            record = self.step(saved)
            last = p.step == t.steps
            if metrics is not None and (p.step % t.log_every == 0 or last):
                metrics.add(record)
            if self.display is not None:
                self.display.update(record)
            best = p.best_step
            if p.step % t.eval_every == 0 or last:
                val_loss = self._validate(metrics, thorough=last)
            if p.step % t.save_every == 0 or last or p.solved or p.best_step != best:
                saved = self._save(metrics, saved)
        if saved != checkpoints.step_folder(self.folder, p.step):
            saved = self._save(metrics, saved)
        assert saved is not None
        stopped_by = signal_number if p.step < t.steps and not p.solved else None
        return Result(self.folder, saved, p.step, val_loss, self.team.is_first, stopped_by=stopped_by)

    def _asked_to_stop(self, interrupts: "Interrupts") -> int | None:
        """Return the signal that any process received, so that all processes stop after the same step."""
        (anyone,) = self.team.sum(float(interrupts.received is not None))
        if not anyone:
            return None
        received: list[int | None] = self.team.gather(interrupts.received)
        return next(number for number in received if number is not None)

    def step(self, last_checkpoint: Path | None = None) -> Record:
        """Make one optimizer step. A loss or gradient that is not finite stops the run before the weights change."""
        t, p = self.config.train, self.progress
        began = time.perf_counter()
        passes, rate = passes_of_step(t, p.step), learning_rate(t, p.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
        losses, residual, macs, skipped = [], None, 0, 0
        share = t.batch_size // self.team.size
        measure = (p.step + 1) % t.log_every == 0 or p.step + 1 == t.steps
        for part in range(t.accumulate):
            first = p.sequences + part * t.batch_size + self.team.rank * share
            inputs_BT, targets_BT = (tokens.to(self.device) for tokens in self.source.read(first, share))
            with self.team.synchronising(self.wrapped, now=part == t.accumulate - 1):
                loss = self.objective.backward(
                    inputs_BT, targets_BT, passes, 1.0 / t.accumulate, measure, wrapped=self.wrapped
                )
            losses.append(loss.mean)
            tokens = inputs_BT.shape[1]
            macs += share * self.macs(passes, loss.adjoint_steps, tokens)
            skipped += t.batch_size * (t.block_size - tokens)
            residual = loss.residual
        # Averaged over all processes, as the gradient is, so that a value that is not finite in one stops them all.
        total, all_macs = self.team.sum(float(torch.stack(losses).mean()) / self.team.size, macs)
        norm = float(whole_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), t.clip)))
        if not isfinite(total) or not isfinite(norm):
            what = f"the loss is {total}" if not isfinite(total) else f"the gradient norm is {norm}"
            raise self._diverged(what, "training stopped before the weights were updated", last_checkpoint)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        p.step += 1
        p.sequences += t.sequences_per_step
        p.skipped_tokens += skipped
        p.macs += round(all_macs)
        p.seconds += time.perf_counter() - began
        return self._standing() | {
            "loss": total,
            "lr": rate,
            "grad_norm": norm,
            "passes": passes,
            "residual": residual,
        }

    def _validate(self, metrics: Metrics | None, thorough: bool = False) -> float:
        """Score the model in full precision, and record the best loss and whether the task is solved."""
        p = self.progress
        self.model.eval()
        with self.team.whole(self.wrapped):
            mine = self.source.score(self.model, p.step, (self.team.rank, self.team.size), thorough)
        self.model.train()
        record = self._standing() | self.source.summary(self.team.gather(mine))
        if record.get("solved") and not thorough:
            return self._validate(metrics, thorough=True)
        loss: float = record["val_loss"]
        if isfinite(loss) and p.step > 0 and (p.best_loss is None or loss < p.best_loss):
            p.best_step, p.best_loss = p.step, loss
        p.solved = record.get("solved", False)
        if metrics is not None:
            metrics.add(record)
        if self.display is not None:
            self.display.update(record)
        return loss

    def _save(self, metrics: Metrics | None, last_checkpoint: Path | None) -> Path:
        """Write a checkpoint. It is an error if a weight is no longer finite."""
        good = all(bool(local_part(p).isfinite().all()) for p in self.model.parameters())
        if self.team.sum(float(not good))[0]:
            raise self._diverged("a weight is not finite", "nothing was saved", last_checkpoint)
        if metrics is not None:
            metrics.sync()
        return save_checkpoint(
            self.config, self.progress, self.model, self.optimizer, self.team, tokenizer_folder=self.source.folder
        )

    def _diverged(self, what: str, done: str, last_checkpoint: Path | None) -> ContextReadyError:
        good = "none yet" if last_checkpoint is None else f"{last_checkpoint}"
        return ContextReadyError(
            f"At step {self.progress.step:,} {what}, so {done} (last good checkpoint: {good}); try a lower lr, more "
            "warmup or precision=fp32."
        )

    def _standing(self) -> Record:
        p = self.progress
        tokens = p.sequences * self.config.train.block_size - p.skipped_tokens
        return {"step": p.step, "tokens": tokens, "seconds": round(p.seconds, 3), "macs": p.macs}

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _describe(self) -> str:
        architecture = "transformer" if self.config.model.correction is None else "context-ready"
        team = "" if self.team.size == 1 else f", {self.team.size} processes ({self.config.train.parallel})"
        precision = "bf16" if self.bf16 else "fp32"
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        frozen = "" if trained == self.account.parameters else f" ({trained:,} trained)"
        return f"{self.account.parameters:,} parameters{frozen}, {architecture}, {self.device}, {precision}{team}"


class Interrupts:
    """Turns the first SIGTERM or SIGINT (Ctrl-C) into a request to stop after the step; the second acts at once.

    Under torchrun the second does not act, because the same signal may arrive twice, once directly and once from
    torchrun. torchrun itself kills processes that take too long.
    """

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
        if not dist.is_torchelastic_launched():
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *_: object) -> None:
        self._restore()


def load_origin(model: ContextReady, config: RunConfig, origin: checkpoints.Checkpoint, source: Source) -> None:
    """Load the initial weights from a checkpoint: the whole model, or only the blocks if it holds a transformer."""
    for key in MEANINGS:
        theirs, ours = getattr(origin.native_config, key), getattr(config.model, key)
        if theirs != ours:
            raise ContextReadyError(f"{origin.folder} was trained with {key}={theirs}, not {ours}; set {key}={theirs}.")
    if origin.progress.tokenizer_sha256 != source.tokenizer_sha256:
        raise ContextReadyError(
            f"{origin.folder} was trained with another tokenizer than that of {source.name}. Prepare the data with: "
            f"crt data prepare OUT FILES --tokenizer {origin.folder}"
        )
    target = model.backbone if model.is_recurrent and origin.native_config.correction is None else model
    assert isinstance(target, nn.Module)
    expected = checkpoints.shapes_of(checkpoints.named_weights(target))
    checkpoints.load_weights(target, origin.tensors("model", expected), origin.folder)


def make_optimizer(model: ContextReady, config: RunConfig) -> torch.optim.AdamW:
    """Create a fused AdamW optimizer: weight decay for matrices or for everything, the correction at its own rate."""
    t = config.train
    trained = [p for p in model.parameters() if p.requires_grad]
    own = {id(p) for p in model.correction.parameters()}
    groups = []
    for of_correction, factor in ((False, 1.0), (True, t.correction_lr)):
        part = [p for p in trained if (id(p) in own) == of_correction]
        for is_matrix, decay in ((True, t.weight_decay), (False, t.weight_decay if t.decay == "all" else 0.0)):
            params = [p for p in part if (p.dim() >= 2) == is_matrix]
            if params:
                groups.append({"params": params, "weight_decay": decay, "lr_factor": factor})
    fused = next(model.parameters()).device.type in ("cpu", "cuda", "mps")
    return torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), eps=t.eps, fused=fused)
