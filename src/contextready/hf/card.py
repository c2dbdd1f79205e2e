"""Model cards: what a saved model is, how to load it, what it costs and what was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contextready.model.correction import find_correction


def write_card(
    folder: Path, config: Any, base: str | None, costs: Sequence[tuple[str, str]], measured: Mapping[str, str]
) -> None:
    """Write README.md; `costs` are the rows of a table, and `measured` is what is known about the model's quality."""
    correction = getattr(config, "correction", None) if config.model_type == "contextready" else None
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if base is not None:
        lines.append(f"base_model: {base}")
    lines += ["tags:", "- contextready" if correction else "- text-generation", "---", ""]
    if correction is None:
        lines += ["# Transformer language model", "", "A causal language model, saved by `contextready`."]
    else:
        lines += [
            "# Context-ready language model",
            "",
            "A causal language model that corrects each token embedding with the output of the blocks at the previous",
            "position, before the token enters the blocks. When it generates text from left to right, it is a",
            "recurrent network with a KV cache.",
            "",
            f"    correction_t = {find_correction(correction).formula},   x_t = e_t + correction_t",
        ]
    ours = config.model_type.startswith("contextready")
    lines += ["", "## How to load it", "", "```python", *_loading(ours), "```", ""]
    if ours:
        lines += [
            "The code is stored with the weights. If the package `contextready` is installed, the model also loads",
            "without `trust_remote_code` after `import contextready.hf.modeling`, and the commands `crt generate`,",
            "`crt eval` and `crt train` accept this folder.",
            "",
        ]
    if costs:
        lines += [
            "## Cost",
            "",
            "| | |",
            "|---|---:|",
            *(f"| {name} | {value} |" for name, value in costs),
            "",
        ]
    lines += ["## Measurements", ""]
    lines += [f"- {name}: {value}" for name, value in measured.items()] or ["None yet."]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _loading(remote: bool) -> list[str]:
    trust = ", trust_remote_code=True" if remote else ""
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "."  # this folder, or its name on the Hub',
        f"model = AutoModelForCausalLM.from_pretrained(folder{trust})",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        'inputs = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
    ]
