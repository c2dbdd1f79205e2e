"""The model card that lies beside a model: what it is, how to load it, what was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contextready.model.correction import find_correction


def write_card(
    folder: Path, config: Any, base: str | None, costs: Sequence[tuple[str, str]], measured: Mapping[str, str]
) -> None:
    """Write README.md; `costs` are rows of a table, `measured` is what is known of the model's quality."""
    correction = getattr(config, "correction", None) if config.model_type == "contextready" else None
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if base is not None:
        lines.append(f"base_model: {base}")
    lines += ["tags:", "- contextready" if correction else "- text-generation", "---", ""]
    if correction is None:
        lines += ["# A transformer", "", "A causal language model, written by `contextready`."]
    else:
        lines += [
            "# A context-ready language model",
            "",
            "A causal language model whose tokens enter its blocks already corrected by what the previous position's",
            "blocks gave out: generating left to right it is a recurrent network with a KV cache.",
            "",
            f"    correction_t = {find_correction(correction).formula},   x_t = e_t + correction_t",
        ]
    ours = config.model_type.startswith("contextready")
    lines += ["", "## Load it", "", "```python", *_loading(ours), "```", ""]
    if ours:
        lines += [
            "The code comes with the weights. With `pip install contextready` it loads without `trust_remote_code`",
            "after `import contextready.hf.modeling`, and `crt generate`, `crt eval` and `crt train` take this folder.",
            "",
        ]
    if costs:
        lines += [
            "## What it costs",
            "",
            "| | |",
            "|---|---:|",
            *(f"| {name} | {value} |" for name, value in costs),
            "",
        ]
    lines += ["## What was measured", ""]
    lines += [f"- {name}: {value}" for name, value in measured.items()] or ["Nothing yet."]
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
