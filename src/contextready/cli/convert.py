"""`crt convert`: pretrained models made context-ready, and runs in the format of Hugging Face."""

import argparse
from pathlib import Path

from contextready.cli.options import Verbs, verb


def add(verbs: Verbs) -> None:
    """Describe `crt convert`."""
    from contextready.model.correction import describe_corrections

    convert = verb(
        verbs,
        "convert",
        "a pretrained model made context-ready, or a run as Hugging Face has it",
        "Give a pretrained causal language model a correction that starts at zero: the same function, ready\n"
        "to be fine-tuned, in the format of Hugging Face. A run or checkpoint of this package is written in\n"
        "that format as well, and such a folder as a checkpoint again.",
        f"corrections:\n{describe_corrections(with_network=True)}\n\n"
        "examples:\n"
        "  crt convert HuggingFaceTB/SmolLM2-135M smollm2-crt\n"
        "  crt convert model.gguf model-crt --correction concat\n"
        "  crt convert runs/mini-d1 mini-d1-hf            a run, for from_pretrained and generate\n"
        "  crt convert mini-d1-hf mini-d1-again           and back, bit for bit",
    )
    convert.add_argument("model", help="folder, name on the Hugging Face Hub, .gguf file, run or checkpoint")
    convert.add_argument("out", type=Path, help="folder to make")
    convert.add_argument("--correction", default="add", help="one of those below (default: add)")
    convert.add_argument("--bias", action="store_true", help="biases in the correction")
    convert.add_argument(
        "--passes", type=int, default=5, help="K when transformers' own Trainer trains it (default: 5)"
    )
    convert.add_argument("--best", action="store_true", help="of a run the best checkpoint, not the newest")
    convert.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from contextready.extras import require

    require("transformers", "hf")
    from contextready.hf.convert import convert

    result = convert(
        options.model,
        options.out,
        correction=options.correction,
        bias=options.bias,
        passes=options.passes,
        best=options.best,
    )
    for name, value in result.costs:
        print(f"{name}: {value}")
    print(result.what)
