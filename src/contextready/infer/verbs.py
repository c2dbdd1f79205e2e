"""The verbs `crt generate`, `crt export` and `crt bench`."""

import argparse
import os
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.verbs import Verbs, verb


def add_generate(verbs: Verbs) -> None:
    """Describe `crt generate`."""
    generate = verb(
        verbs,
        "generate",
        "continue prompts, token by token",
        "Continue prompts from the command line, from a file, or from standard input. One\n"
        "completion appears as it comes; several are printed one after the other.",
        "examples:\n"
        '  crt generate runs/mini-d1 "The history of" --seed 1\n'
        "  crt generate runs/mini-d1 --file prompts.txt --samples 3 --json\n"
        '  crt generate runs/mini-d1 "The history of" --save-state some.state\n'
        '  crt generate runs/mini-d1 " and then" --state some.state\n'
        '  crt generate model.gguf "The history of" --temperature 0 --stats',
    )
    generate.add_argument("model", type=Path, help="run, checkpoint, or exported .gguf file")
    generate.add_argument("prompts", nargs="*", help="texts to continue (default: standard input, as one)")
    generate.add_argument("--file", type=Path, help="a file of prompts, one a line")
    generate.add_argument("--max-tokens", type=int, default=128, help="tokens to generate (default: 128)")
    generate.add_argument("--samples", type=int, default=1, help="completions of each prompt (default: 1)")
    generate.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    generate.add_argument("--top-k", type=int, help="draw among the k likeliest tokens only")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="draw among the likeliest tokens that together reach p"
    )
    generate.add_argument(
        "--min-p", type=float, default=0.0, help="draw among tokens at least p times as likely as the likeliest"
    )
    generate.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: avoid tokens seen before")
    generate.add_argument("--stop", action="append", default=[], help="end before this text (may be repeated)")
    generate.add_argument("--past-end", action="store_true", help="do not stop at the end-of-text token")
    generate.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and the N likeliest"
    )
    generate.add_argument(
        "--context", type=int, help="room for so many tokens (default: as needed; none with a window)"
    )
    generate.add_argument("--engine", help="eager, compiled, or ggml for exported files (default: eager)")
    generate.add_argument("--solver", help="how prompts are read: sweep, jacobi or sequential (default: sweep)")
    generate.add_argument("--tolerance", type=float, help="error that sweep and jacobi may leave (default: 0.03)")
    generate.add_argument("--chunk", type=int, help="tokens of a prompt solved at once (default: 4096)")
    generate.add_argument("--state", type=Path, help="go on from a saved session")
    generate.add_argument("--rollback", type=int, default=0, metavar="N", help="first take back its last N tokens")
    generate.add_argument("--save-state", type=Path, help="save the session at the end, to go on later")
    generate.add_argument("--history", type=int, help="tokens that a saved session can be rolled back (default: 1)")
    generate.add_argument("--threads", type=int, help="threads to compute with (default: all cores)")
    generate.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (default: auto)")
    generate.add_argument("--stats", action="store_true", help="say how prompts were read and how fast it went")
    generate.add_argument("--json", action="store_true", help="print one JSON line a completion")
    generate.set_defaults(run=_generate)


def add_export(verbs: Verbs) -> None:
    """Describe `crt export`."""
    export = verb(
        verbs,
        "export",
        "write a model for the fast CPU engine",
        "Write a run or checkpoint as a GGUF file for the engine ggml: weights, settings and\n"
        "tokenizer in one file that is run without torch. Says what the file's precision costs in\n"
        "perplexity, measured on the validation data.",
        "example:\n  crt export runs/mini-d1 mini.gguf --type q8_0",
    )
    export.add_argument(
        "run_folder", metavar="run", type=Path, help="run (its newest checkpoint is used) or checkpoint"
    )
    export.add_argument("out", type=Path, help="file to write, ending in .gguf")
    export.add_argument("--type", default="f16", help="f32, f16, q8_0 or q4_0 (default: f16)")
    export.add_argument(
        "--tokens", type=int, default=4096, help="validation tokens to measure on, 0: none (default: 4096)"
    )
    export.add_argument("--data", type=Path, help="prepared data (default: what the model was trained on)")
    export.set_defaults(run=_export)


def add_bench(verbs: Verbs) -> None:
    """Describe `crt bench`."""
    bench = verb(
        verbs,
        "bench",
        "how fast models generate here",
        "Measure decoding, reading prompts and memory. Contestants take turns, beside a probe of the\n"
        "memory's bandwidth. Without a model: the paper's two timed pairs, with random weights.",
        "examples:\n"
        "  crt bench runs/mini-d1 --prefill 128,256\n"
        "  crt bench owt-d1-c2048 owt-n6-c1088 --engines ggml --precisions f32,q8_0 --peers\n"
        "  crt bench vocab_size=4096 width=256 layers=1 heads=4 correction=add --contexts 100,1000 --plot bench.png",
    )
    bench.add_argument("what", nargs="*", help="runs, .gguf files, models of the paper by name, or settings key=value")
    bench.add_argument("--engines", default="eager,ggml", help="of eager, compiled, ggml (default: eager,ggml)")
    bench.add_argument("--precisions", default="f32,q8_0", help="of f32, f16, q8_0, q4_0, for ggml (default: f32,q8_0)")
    bench.add_argument("--contexts", default="256", help="tokens already read (default: 256)")
    bench.add_argument("--tokens", type=int, default=32, help="steps timed in a round (default: 32)")
    bench.add_argument("--rounds", type=int, default=5, help="turns of every contestant (default: 5)")
    bench.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    bench.add_argument("--peers", action="store_true", help="Hugging Face and llama.cpp beside every transformer")
    bench.add_argument("--prefill", default="", help="lengths of prompts to read with every solver")
    bench.add_argument("--plot", type=Path, help="a picture to draw: .png, .svg or .pdf")
    bench.add_argument("--json", action="store_true", help="print one JSON line instead of tables")
    bench.set_defaults(run=_bench)


def _generate(options: argparse.Namespace) -> None:
    from contextready.infer.console import Request, run_generate
    from contextready.infer.sampling import Sampling

    chosen = {name: getattr(options, name) for name in ("solver", "tolerance", "chunk", "history")}
    run_generate(
        options.model,
        Request(
            prompts=options.prompts,
            file=options.file,
            max_tokens=options.max_tokens,
            samples=options.samples,
            seed=options.seed,
            stops=options.stop,
            past_end=options.past_end,
            logprobs=options.logprobs,
            context=options.context,
            state=options.state,
            save_state=options.save_state,
            rollback=options.rollback,
            as_json=options.json,
            stats=options.stats,
        ),
        Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty),
        kind=options.engine,
        threads=options.threads,
        device=options.device,
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _export(options: argparse.Namespace) -> None:
    from contextready.infer.export import run_export

    run_export(options.run_folder, options.out, options.type, options.tokens, options.data)


def _bench(options: argparse.Namespace) -> None:
    from contextready.infer.bench_console import Bench, run_bench

    run_bench(
        Bench(
            what=options.what,
            engines=options.engines.split(","),
            precisions=options.precisions.split(","),
            contexts=_numbers("contexts", options.contexts),
            tokens=options.tokens,
            rounds=options.rounds,
            threads=options.threads,
            peers=options.peers,
            prefill=_numbers("prefill", options.prefill),
        ),
        options.json,
        options.plot,
    )


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise ContextReadyError(f"--{name} {text} is not a list of numbers; write it as 256,1024.") from None
