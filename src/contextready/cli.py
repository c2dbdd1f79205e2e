"""The command `crt`: thin verbs over importable functions."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from contextready import __version__
from contextready.analysis.verbs import add_eval, add_plot
from contextready.errors import ContextReadyError
from contextready.hf.verbs import add_convert
from contextready.infer.verbs import add_bench, add_export, add_generate
from contextready.model.build import ModelConfig
from contextready.reproduce.verbs import add_pointer, add_reproduce
from contextready.settings import describe_settings
from contextready.verbs import Verbs, verb

MORE_WORDS = {
    **dict.fromkeys(("train", "plan", "pointer", "reproduce"), "settings"),
    "generate": "prompts",
    "bench": "what",
}
"""Verbs that take any number of words, and under which name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; bad input prints one sentence and returns 2."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse closes a list of words at the first option: crt train mini-d1 --dry-run steps=5
    more = MORE_WORDS.get(options.verb)
    if more and rest and not any(word.startswith("-") or ("=" not in word and more == "settings") for word in rest):
        setattr(options, more, [*getattr(options, more), *rest])
        rest = []
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code = options.run(options)
        sys.stdout.flush()
    except ContextReadyError as error:
        print(f"crt {options.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left (`crt info --json | head`): nothing is wrong, and the interpreter must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"crt {options.verb}: a file could not be read or written: {error}", file=sys.stderr)
        return 2
    return code or 0


def build_parser() -> argparse.ArgumentParser:
    """Describe every verb and option."""
    parser = argparse.ArgumentParser(
        prog="crt", description="Context-ready language models: train, measure, see and check them."
    )
    parser.add_argument("--version", action="version", version=f"contextready {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add in (
        _add_demo,
        _add_data,
        _add_train,
        _add_plan,
        _add_unshard,
        add_eval,
        add_convert,
        add_generate,
        add_export,
        add_bench,
        add_plot,
        add_pointer,
        add_reproduce,
        _add_info,
        _add_exact,
    ):
        add(verbs)
    return parser


def _add_data(verbs: Verbs) -> None:
    data = verb(verbs, "data", "prepare token shards from text", "Turn text into token shards, and look at them.")
    kinds = data.add_subparsers(dest="what", required=True, metavar="prepare|show")
    prepare = verb(
        kinds,
        "prepare",
        "text in, token shards out",
        "Tokenise documents into memory-mapped shards with a manifest. The folder appears when\nall is done.",
        "examples:\n"
        "  crt data prepare data/mini default --vocab-size 4096\n"
        "  crt data prepare data/mine texts/ 'more/*.jsonl.zst' --vocab-size 16000\n"
        "  crt data prepare data/owt32k openwebtext --vocab-size 32000\n"
        "  crt data prepare data/nano train.bin --val val.bin --end-id 50256 --vocab-size 50257",
    )
    prepare.add_argument("out", type=Path, help="folder to make")
    prepare.add_argument(
        "sources",
        nargs="+",
        help="files (.txt .jsonl .jsonl.gz .jsonl.zst .parquet, or token files .bin), folders, globs, or one corpus: "
        "default, sotu, stdlib, openwebtext, wikipedia",
    )
    prepare.add_argument("--val", nargs="+", default=[], metavar="SOURCE", help="validation documents of their own")
    prepare.add_argument(
        "--val-fraction", type=float, default=0.005, help="else: part of the documents, by hash (default: 0.005)"
    )
    prepare.add_argument("--vocab-size", type=int, help="train a byte-level BPE of this size")
    prepare.add_argument("--tokenizer", help="use this tokenizer.json, or the one in this folder")
    prepare.add_argument("--end-token", help="the token that ends documents, if the tokenizer does not say")
    prepare.add_argument("--end-id", type=int, help="its id, for token files without a tokenizer")
    prepare.add_argument("--field", default="text", help="where the text is in .jsonl and .parquet (default: text)")
    prepare.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens a shard (default: 100000000)")
    prepare.add_argument(
        "--tokenizer-bytes", type=int, default=1_000_000_000, help="text to train the BPE on, about (default: 1 GB)"
    )
    prepare.set_defaults(run=_prepare)
    show = verb(kinds, "show", "decode samples", "Print stretches of prepared data as text.")
    show.add_argument("data", type=Path, help="folder of prepared data")
    show.add_argument("--split", choices=["train", "val"], default="train", help="which part (default: train)")
    show.add_argument("--count", type=int, default=3, help="how many stretches (default: 3)")
    show.add_argument("--tokens", type=int, default=64, help="tokens in each (default: 64)")
    show.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    show.set_defaults(run=_show)


def _add_train(verbs: Verbs) -> None:
    from contextready.train.config import PretrainedModelConfig, TrainConfig

    train = verb(
        verbs,
        "train",
        "train a model, or go on training it",
        "Train a context-ready model or a transformer by a recipe. The same command goes on after\nany interruption.",
        f"settings of the training:\n{describe_settings(TrainConfig)}\n\n"
        f"settings of the model:\n{describe_settings(ModelConfig)}\n\n"
        f"settings of a model of Hugging Face:\n{describe_settings(PretrainedModelConfig)}\n\n"
        "examples:\n"
        "  crt train mini-d1\n"
        "  crt train mini-d1 data=data/mine out=runs/mine correction_init=zero steps=4000\n"
        "  crt train owt-d5-c1120 precision=bf16 compile=true\n"
        "  crt train convert pretrained=smollm2-crt data=data/mine tune=lora",
    )
    train.add_argument("recipe", nargs="?", help="name of a recipe, or a YAML file")
    train.add_argument("settings", nargs="*", metavar="key=value", help="settings that change it")
    train.add_argument("--list", action="store_true", help="list the recipes")
    train.add_argument("--dry-run", action="store_true", help="print the settings and the cost, and train nothing")
    train.set_defaults(run=_train)


def _add_plan(verbs: Verbs) -> None:
    plan = verb(
        verbs,
        "plan",
        "memory and time of a training before it is started",
        "Print what a training needs: parameters, memory of each GPU by what it is for, FLOPs of a\n"
        "step, and the time at a stated utilisation. No weight is allocated.",
        "examples:\n"
        "  crt plan owt-d5-c1120 --gpus 8\n"
        "  crt plan mini-d1 vocab_size=4096          without prepared data, the vocabulary must be said\n"
        "  crt plan owt-d5-c1120 gradient=implicit parallel=fsdp --gpus 8 --tflops 989 --utilisation 0.35",
    )
    plan.add_argument("recipe", help="name of a recipe, or a YAML file")
    plan.add_argument("settings", nargs="*", metavar="key=value", help="settings that change it")
    plan.add_argument("--gpus", type=int, default=1, help="processes that share the work (default: 1)")
    plan.add_argument(
        "--tflops",
        type=float,
        default=312.0,
        help="peak of one GPU in TFLOP/s, in the plan's precision (default: 312, an A100 in bf16)",
    )
    plan.add_argument("--utilisation", type=float, default=0.4, help="part of the peak that is reached (default: 0.4)")
    plan.add_argument("--json", action="store_true", help="print one JSON line instead")
    plan.set_defaults(run=_plan)


def _add_unshard(verbs: Verbs) -> None:
    unshard = verb(
        verbs,
        "unshard",
        "a plain checkpoint from a sharded one",
        "Write the checkpoint of a run with parallel=fsdp as plain safetensors. The metadata of a\n"
        "sharded checkpoint is a pickle, which can run code when it is read: only for your own runs.",
    )
    unshard.add_argument("checkpoint", type=Path, help="run (its newest checkpoint is used) or checkpoint")
    unshard.add_argument("out", type=Path, help="folder to make")
    unshard.set_defaults(run=_unshard)


def _add_info(verbs: Verbs) -> None:
    info = verb(
        verbs,
        "info",
        "what a model costs: FLOPs, parameters, cache",
        "Print FLOPs per token, parameters and cache bytes of models, without allocating weights.\n"
        "With no argument: every model of the paper, beside the paper's figures.",
        f"settings:\n{describe_settings(ModelConfig)}\n\n"
        "examples:\n"
        "  crt info owt-d5-c1120\n"
        "  crt info owt-d5-c1120 owt-n12-c768 --dtype bfloat16\n"
        "  crt info vocab_size=4096 width=128 layers=1 heads=4 correction=add",
    )
    info.add_argument("what", nargs="*", help="names of the paper's models, or settings key=value, or both")
    info.add_argument("--context", type=int, help="tokens in the context (default: the model's block size, or 1024)")
    info.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32", help="type of the cache"
    )
    info.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    info.set_defaults(run=_info)


def _add_demo(verbs: Verbs) -> None:
    demo = verb(
        verbs,
        "demo",
        "train a small model and its transformer, and compare",
        "Train one context-ready layer and the transformer of the same cost on text that comes\n"
        "with the installation, evaluate both, draw their curves and stream a sample: a few\n"
        "minutes on two cores.",
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the runs (default: runs/demo)")
    demo.add_argument("--steps", type=int, help="updates of each model (default: the recipe's)")
    demo.set_defaults(run=_demo)


def _add_exact(verbs: Verbs) -> None:
    exact = verb(
        verbs,
        "exact",
        "see streaming and parallel passes agree on a random model",
        "Stream tokens one by one through a small randomly initialised model, solve for all of\n"
        "them at once in parallel passes, and show that both are one function.",
    )
    exact.add_argument("--tokens", type=int, default=48, help="length of the sequence (default: 48)")
    exact.add_argument("--layers", type=int, default=1, help="D, the number of blocks (default: 1)")
    exact.add_argument("--width", type=int, default=64, help="C, a multiple of 8 (default: 64)")
    exact.add_argument("--seed", type=int, default=0, help="seed of the weights and tokens (default: 0)")
    exact.set_defaults(run=_exact)


def _prepare(options: argparse.Namespace) -> None:
    from contextready.data.console import run_prepare
    from contextready.data.prepare import Preparation

    run_prepare(
        options.out,
        Preparation(
            sources=options.sources,
            val_sources=options.val,
            val_fraction=options.val_fraction,
            vocab_size=options.vocab_size,
            tokenizer=options.tokenizer,
            end_token=options.end_token,
            end_id=options.end_id,
            field=options.field,
            shard_tokens=options.shard_tokens,
            tokenizer_bytes=options.tokenizer_bytes,
        ),
    )


def _show(options: argparse.Namespace) -> None:
    from contextready.data.console import show

    show(options.data, options.split, options.count, options.tokens, options.seed)


def _plan(options: argparse.Namespace) -> int:
    from contextready.train.console import print_plan
    from contextready.train.recipes import resolve

    config = resolve(options.recipe, options.settings)
    print_plan(config, options.gpus, options.tflops, options.utilisation, options.json)
    return 0


def _unshard(options: argparse.Namespace) -> int:
    from contextready.train.checkpoint import unshard

    print(f"Wrote {unshard(options.checkpoint, options.out)}. Next: crt eval {options.out}")
    return 0


def _train(options: argparse.Namespace) -> int:
    from contextready.train.console import print_recipes, print_settings, run_train
    from contextready.train.pointer import run_pointer
    from contextready.train.recipes import resolve

    if options.list:
        print_recipes()
        return 0
    if options.recipe is None:
        raise ContextReadyError("Name a recipe, for example mini-d1; crt train --list shows all.")
    config = resolve(options.recipe, options.settings)
    if options.dry_run:
        print_settings(config)
        return 0
    return run_train(config) if config.task is None else run_pointer(config)


def _info(options: argparse.Namespace) -> None:
    from contextready.info import print_info

    print_info(options.what, options.context, options.dtype, options.json)


def _demo(options: argparse.Namespace) -> int:
    from contextready.demo import run_demo

    return run_demo(options.out, options.steps)


def _exact(options: argparse.Namespace) -> None:
    from contextready.exact import print_exact

    print_exact(options.tokens, options.layers, options.width, options.seed)


if __name__ == "__main__":
    sys.exit(main())
