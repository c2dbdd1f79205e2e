"""`crt convert`: makes pretrained models context-ready, and converts runs to Hugging Face format and back."""

import argparse
from pathlib import Path

from contextready.cli.options import Verbs, verb, whole_number
from contextready.files import to_json
from contextready.hf.trust import add_trust_option

EXAMPLES = """
crt convert HuggingFaceTB/SmolLM2-135M smollm2-crt
crt convert model.gguf model-crt --correction concat
crt convert runs/mini-d1 mini-d1-hf            # a run, for from_pretrained and generate
crt convert mini-d1-hf mini-d1-again           # and back, bit for bit
"""


def add(verbs: Verbs) -> None:
    """Describe `crt convert`."""
    convert = verb(
        verbs,
        "convert",
        "make a pretrained model context-ready, or convert a run to Hugging Face format",
        "Add a correction to a pretrained causal language model and save it in Hugging Face format.\n"
        "The correction starts at zero, so the model computes the same function until it is\n"
        "fine-tuned. Llama, Mistral, Qwen2, Qwen3 and SmolLM models then run natively; others\n"
        "keep a wrapper. A run or checkpoint is converted to Hugging Face format, and back.",
        EXAMPLES,
        _describe_corrections,
    )
    convert.add_argument("model", help="folder, name on the Hugging Face Hub, .gguf file, run or checkpoint")
    convert.add_argument("out", type=Path, help="folder to create; it must not exist yet")
    convert.add_argument(
        "--correction",
        default="auto",
        help="one of the corrections listed below; auto is balanced if the model's z is over 50 times as large as e, "
        "and add otherwise (default: auto)",
    )
    convert.add_argument("--bias", action="store_true", help="use biases in the correction")
    convert.add_argument(
        "--scale",
        type=float,
        help="factor on the correction's output (default: the root mean square of the model's embeddings)",
    )
    convert.add_argument("--passes", type=whole_number, default=5, help="K for training with transformers' Trainer")
    convert.add_argument("--best", action="store_true", help="use the best checkpoint of a run instead of the newest")
    convert.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    add_trust_option(convert, _run)


def _describe_corrections() -> str:
    from contextready.model.correction import describe_corrections

    return f"corrections:\n{describe_corrections(with_network=True)}"


def _run(options: argparse.Namespace) -> None:
    from contextready.extras import require

    require("transformers", "hf")
    from contextready.hf.convert import convert

    result = convert(
        options.model,
        options.out,
        correction=options.correction,
        bias=options.bias,
        scale=options.scale,
        passes=options.passes,
        best=options.best,
    )
    if options.json:
        print(to_json(result.as_record()))
        return
    for name, value in [] if result.costs is None else result.costs.rows():
        print(f"{name}: {value}")
    print(result.what)
