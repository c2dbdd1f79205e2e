"""Compares the speed of two versions of this package in one run. The last line is one JSON line.

    git worktree add ../before TAG && make -C ../before lint     # another checkout with its own .venv
    python benchmarks/versions.py ../before

Each version runs in its own process and environment and waits for tasks: K passes forward and backward, streaming
steps, training steps of every gradient mode, sequential evaluation, engine steps, prompts. The two versions take turns
call by call, so that a slow moment of the machine affects both. Several pairs of processes run one after the other,
because two processes with identical code can differ by a few percent. A ratio above 1 means that this version is
faster. The ggml tasks run the same code in both versions, so their ratios show the noise. `import contextready` is
timed against `import torch` in new interpreters.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
V, T, PASSES = 1024, 256, 5
ROUNDS = 5
SECONDS = 4.0
"""A pair repeats a task for about this many seconds in total, and for at least `ROUNDS` rounds."""

Task = Callable[[], object]


def tasks(scratch: Path) -> dict[str, Task]:
    """The tasks to time, by name; runs in a version's own process, with that version's modules."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from contextready import ModelConfig, build_model

    try:
        from contextready.data.batches import Sequences
        from contextready.infer.ggml.engine import GgmlEngine
        from contextready.infer.ggml.file import write_gguf
        from contextready.measure.perplexity import sequential_score
        from contextready.runs.config import build_run
    except ImportError:  # version 0.1.0
        from contextready.analysis.perplexity import sequential_score
        from contextready.infer.ggml_engine import GgmlEngine
        from contextready.infer.gguf_file import write_gguf
        from contextready.train.config import build_run

        from contextready.data.batches import Windows as Sequences
    from contextready.infer.torch_engine import torch_engine
    from contextready.train.objective import Objective

    torch.manual_seed(0)
    named: dict[str, Task] = {}

    def model_of(layers: int, width: int, correction: str | None = "add", vocab_size: int = V) -> Any:
        config = ModelConfig(
            vocab_size, width, layers, heads=16 if width == 1120 else max(1, width // 64), correction=correction
        )
        return build_model(config)

    def passes_of(model: Any, k: int) -> Task:
        tokens, targets = torch.randint(V, (8, T)), torch.randint(V, (8 * T,))

        def run() -> None:
            logits = model(tokens, k) if k > 1 else model(tokens)
            F.cross_entropy(logits.flatten(0, 1), targets).backward()
            model.zero_grad(set_to_none=True)

        return run

    for layers, width in ((1, 256), (4, 256), (1, 512)):
        named[f"K={PASSES} forward and backward, D={layers} C={width}"] = passes_of(model_of(layers, width), PASSES)
    named["transformer forward and backward, N=4 C=256"] = passes_of(model_of(4, 256, None), 1)

    def steps_of(model: Any) -> Task:
        token = torch.zeros(1, 1, dtype=torch.long)
        with torch.inference_mode():
            _, warm = model.stream(torch.zeros(1, 64, dtype=torch.long), model.init_state(1))

        @torch.inference_mode()
        def run() -> None:
            state = warm
            for _ in range(20):
                _, state = model.stream(token, state)

        return run

    for layers, width in ((1, 256), (4, 256), (4, 512)):
        named[f"20 streaming steps, D={layers} C={width}"] = steps_of(model_of(layers, width).eval())

    def gradient_of(gradient: str) -> Task:
        model, tokens = model_of(2, 256), torch.randint(V, (8, 128))
        objective, k = Objective(model, gradient=gradient), None if gradient == "bptt" else 4

        def run() -> None:
            objective.backward(tokens, tokens, k)
            model.zero_grad(set_to_none=True)

        return run

    for gradient in ("unroll", "truncated", "implicit", "bptt"):
        named[f"gradient={gradient}, D=2 C=256"] = gradient_of(gradient)

    ids = np.random.default_rng(0).integers(1, V, 64 * T + 1).astype("<u2")

    class Split:
        """The part of prepared data's interface that scoring needs."""

        def __len__(self) -> int:
            return len(ids)

        def read(self, start: int, count: int) -> Any:
            return ids[start : start + count]

    streaming = model_of(1, 128).eval()
    named["sequential evaluation, 64 × 256 tokens, D=1 C=128"] = lambda: sequential_score(
        streaming, Sequences(Split(), T), 64
    )

    def decode(engine: Any, count: int) -> Task:
        prompt = torch.randint(V, (256,)).tolist()

        def run() -> None:
            engine.load(0, None)
            engine.read(0, prompt[:8])
            for token in prompt[8 : 8 + count]:
                engine.step([token])

        return run

    decoded = model_of(5, 1120).eval()
    small = model_of(1, 256).eval()
    named["eager engine, 16 steps, D=5 C=1120"] = decode(torch_engine(decoded, capacity=256), 16)
    named["eager engine, 100 steps, D=1 C=256"] = decode(torch_engine(small, capacity=256), 100)
    named["compiled engine, 100 steps, D=1 C=256"] = decode(torch_engine(small, "compiled", capacity=256), 100)
    for precision in ("f32", "q8_0"):
        write_gguf(decoded, scratch / f"{precision}.gguf", 256, precision)
        engine = GgmlEngine(scratch / f"{precision}.gguf", capacity=256, threads=2)
        named[f"ggml {precision}, 32 steps, D=5 C=1120"] = decode(engine, 32)

    # A model that contracts, as trained models do: large embeddings and a small correction.
    settled = model_of(2, 256).eval()
    with torch.no_grad():
        settled.backbone.embedding.weight.mul_(20.0)
        settled.correction.ffn.down.weight.mul_(0.3)
    prompt = torch.randint(V, (1024,)).tolist()

    def read_by(solver: str) -> Task:
        engine = torch_engine(settled, capacity=1024, solver=solver, **({"segment": 32} if solver == "sweep" else {}))

        def run() -> None:
            engine.load(0, None)
            engine.read(0, prompt)

        return run

    for solver in ("sweep", "jacobi", "sequential"):
        named[f"a prompt of 1,024 tokens by {solver}, D=2 C=256"] = read_by(solver)
    shape = {"vocab_size": V, "width": 128, "layers": 1, "heads": 2, "correction": "add"}
    named["settings of a run"] = lambda: [build_run(shape | {"data": "d", "out": "o"}) for _ in range(100)]
    return named | opening(scratch, shape | {"width": 512, "layers": 8})


def opening(scratch: Path, shape: dict[str, Any]) -> dict[str, Task]:
    """Tasks that open a checkpoint of 28M parameters and an exported file of 93 MB; for 0.2.0 and later."""
    try:
        import contextready
        from contextready.data.prepare import Preparation, prepare
        from contextready.infer.ggml.engine import GgmlEngine
        from contextready.runs.checkpoint import open_checkpoint
        from contextready.runs.config import build_run
        from contextready.train.trainer import train
    except ImportError:  # version 0.1.0
        return {}
    (scratch / "texts").mkdir()
    for number in range(40):
        (scratch / "texts" / f"{number}.txt").write_text(f"The river of document {number} flows on. " * 40)
    prepare(scratch / "data", Preparation([str(scratch / "texts")], [], 0.2, 300))
    short = {"data": str(scratch / "data"), "out": str(scratch / "run"), "steps": 1, "batch_size": 1, "block_size": 16}
    train(build_run(shape | short | {"eval_tokens": 16, "passes": 2}))
    return {
        "open a checkpoint": lambda: open_checkpoint(scratch / "run").model(),
        "load a checkpoint": lambda: contextready.load(scratch / "run"),
        "open an exported file": lambda: GgmlEngine(scratch / "q8_0.gguf", capacity=256, threads=2),
    }


def work() -> None:
    """Wait for names of tasks, run them, and answer with their seconds."""
    import time

    import torch

    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        named = tasks(Path(scratch))
        print(json.dumps(list(named)), flush=True)
        for line in sys.stdin:
            start = time.perf_counter()
            named[json.loads(line)]()
            print(json.dumps(time.perf_counter() - start), flush=True)


class Version:
    """A process that runs one version."""

    def __init__(self, checkout: Path) -> None:
        self.python = checkout.resolve() / ".venv" / "bin" / "python"
        command = [self.python, __file__, "--work"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tasks: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def seconds(self, task: str) -> float:
        """Run a task once and return its seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def import_seconds(self, module: str) -> float:
        """Seconds that a new interpreter takes to import a module."""
        script = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
        return float(subprocess.run([self.python, "-c", script], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Let both versions take turns at every task, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="another checkout with its own .venv")
    parser.add_argument("--pairs", type=int, default=4, help="number of pairs of new processes (default: 4)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"minimum rounds per task (default: {ROUNDS})")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"seconds per task and pair, roughly (default: {SECONDS})"
    )
    parser.add_argument("--only", default="", help="run only tasks whose name contains this text")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    ratios: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for pair in range(options.pairs):
        print(f"pair {pair + 1} of {options.pairs}", flush=True)
        # The order of starting affects where memory is allocated, so the two versions take turns in it too.
        versions = [Version(checkout) for checkout in ((HERE, options.other), (options.other, HERE))[pair % 2]]
        this, other = versions if pair % 2 == 0 else versions[::-1]
        for task in (task for task in this.tasks if task in other.tasks and options.only in task):
            once = sum(version.seconds(task) for version in versions)
            once = min(once, sum(version.seconds(task) for version in versions))
            for number in range(max(options.rounds, round(options.seconds / once))):
                taken = {version: version.seconds(task) for version in (versions if number % 2 else versions[::-1])}
                ratios.setdefault(task, []).append(taken[other] / taken[this])
                times.setdefault(task, []).append(taken[this])
        for version in versions:
            version.close()
    rows = []
    for task, all_ratios in ratios.items():
        low, middle, high = statistics.quantiles(all_ratios, n=4)
        milliseconds = 1e3 * statistics.median(times[task])
        rows.append({"task": task, "ms": milliseconds, "other_over_this": middle, "quartiles": [low, high]})
        print(f"{middle:6.3f} ({low:.3f} to {high:.3f})  {milliseconds:9.2f} ms  {task}", flush=True)
    imports = []
    for _ in range(5):
        imports.append(this.import_seconds("torch, contextready.model.context_ready") / this.import_seconds("torch"))
    print(f"import of torch and the model takes {statistics.median(imports):.3f} × import torch")
    print(json.dumps({"benchmark": "versions", "tasks": rows, "import_over_torch": statistics.median(imports)}))


if __name__ == "__main__":
    main()
