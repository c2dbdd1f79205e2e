"""A plain GRU as a control: the classical recurrent network, trained on the same sequences with the same optimizer.

It is only a control for tasks. A run is a folder like that of any other run, except that an interrupted one starts
again, because it takes a minute or two.
"""

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError
from contextready.files import check_name, locked_folder, staged_file, write_json
from contextready.formats.safetensors_file import load_tensors, save_tensors
from contextready.model.config import ModelConfig
from contextready.runs.config import RunConfig
from contextready.runs.metrics import FILE, Metrics
from contextready.state.source import StateSource
from contextready.train.objective import mean_cross_entropy
from contextready.train.schedule import learning_rate
from contextready.train.trainer import Display, Interrupts

WEIGHTS = "gru.safetensors"


class GRU(nn.Module):
    """Embedding, GRU layers and a head, with the interface that scores need."""

    def __init__(self, vocab_size: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.gru = nn.GRU(width, width, layers, batch_first=True)
        self.unembedding = nn.Linear(width, vocab_size)

    @property
    def backbone(self) -> "GRU":
        """Itself: embedding and head are its own."""
        return self

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the embeddings (B, T, C)."""
        e_BTC: Tensor = self.embedding(tokens_BT)
        return e_BTC

    def init_state(self, batch_size: int) -> None:
        """A sequence starts without a state."""

    def read(self, e_BTC: Tensor, state: None) -> tuple[Tensor, None]:
        """Return the outputs for whole sequences."""
        return self.gru(e_BTC)[0], None

    def head(self, z_BTC: Tensor) -> Tensor:
        """Return the logits (B, T, V)."""
        logits_BTV: Tensor = self.unembedding(z_BTC)
        return logits_BTV


def build_control(config: RunConfig) -> GRU:
    """Create the GRU with the width and the layers of a run's model."""
    model = config.model
    if not isinstance(model, ModelConfig):
        raise ContextReadyError("--gru replaces the model by a GRU, so pretrained= does not apply; leave one out.")
    return GRU(model.vocab_size, model.width, model.layers)


def load_control(run: Path, config: RunConfig) -> GRU:
    """Load the GRU of a finished run."""
    model = build_control(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(load_tensors(run / WEIGHTS, shapes))
    return model.eval()


def train_control(config: RunConfig, display: Display | None = None) -> int | None:
    """Train a GRU until it has solved the task or made all steps; returns the signal that interrupted it, if any."""
    folder = Path(config.train.out)
    check_name(folder)
    with locked_folder(folder, f"training in {folder}"), Interrupts() as interrupts:
        if (folder / WEIGHTS).exists():
            return None
        (folder / FILE).unlink(missing_ok=True)
        write_json(folder / "config.json", config.as_dict())
        metrics = Metrics(folder, config, -1)
        if display is not None:
            display.start(config, 0, "a GRU, as a control")
        try:
            return _train(config, metrics, display, interrupts)
        finally:
            metrics.close()
            if display is not None:
                display.stop()


def _train(config: RunConfig, metrics: Metrics, display: Display | None, interrupts: Interrupts) -> int | None:
    t, source = config.train, StateSource(config)
    torch.manual_seed(t.seed)
    model = build_control(config)
    optimizer = torch.optim.AdamW(model.parameters(), t.lr, (t.beta1, t.beta2), t.eps, t.weight_decay)
    seconds, tokens = 0.0, 0

    def validated(step: int, thorough: bool) -> bool:
        model.eval()
        record = source.summary([source.score(model, step, (0, 1), thorough)])
        model.train()
        if record["solved"] and not thorough:
            return validated(step, thorough=True)
        record = {"step": step, "tokens": tokens, "seconds": round(seconds, 3), **record}
        metrics.add(record)
        if display is not None:
            display.update(record)
        return bool(record["solved"])

    step, solved = 0, validated(0, thorough=False)
    while step < t.steps and not solved:
        if interrupts.received is not None:
            return interrupts.received
        began = time.perf_counter()
        inputs_BT, targets_BT = source.read(step * t.batch_size, t.batch_size)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(t, step)
        z_BTC, _ = model.read(model.embed(inputs_BT), None)
        mean_cross_entropy(model.head(z_BTC), targets_BT).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds, step, tokens = seconds + time.perf_counter() - began, step + 1, tokens + inputs_BT.numel()
        if step % t.eval_every == 0 or step == t.steps:
            solved = validated(step, thorough=step == t.steps)
    with staged_file(Path(t.out) / WEIGHTS) as staging:
        save_tensors(staging, dict(model.state_dict()))
    return None
