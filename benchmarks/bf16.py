"""Measures what bf16 costs in accuracy, and how many passes over a prompt it saves: errors and counts, no times.

    python benchmarks/bf16.py runs/mini-d1 data/mini/text.txt

The reference streams the text in fp32. The last line is one JSON line.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import contextready
from contextready.model.context_ready import ContextReady
from contextready.model.narrow import NarrowLinear, narrowed
from contextready.solve.norms import norms
from contextready.solve.prefill import prefill
from contextready.solve.prompt_reader import TOLERANCE


@torch.inference_mode()
def main() -> None:
    """Run all measurements and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="run, checkpoint or Hugging Face folder")
    parser.add_argument("text", type=Path, help="text to read")
    parser.add_argument("--tokens", type=int, default=512, help="length of each text (default: 512)")
    parser.add_argument("--texts", type=int, default=8, help="number of texts (default: 8)")
    parser.add_argument("--new", type=int, default=20, help="tokens of each greedy continuation (default: 20)")
    options = parser.parse_args()

    opened = contextready.load(options.model, device="cpu")
    model = opened.model.eval()
    count = options.tokens * options.texts
    characters = options.text.read_text(encoding="utf-8")[: 10 * count]
    tokens_BT = torch.tensor(opened.tokenizer.encode_prompts([characters])[0][:count]).view(options.texts, -1)
    found = {"logits": logits(model, tokens_BT), "prompts": prompts(model, tokens_BT, options.new)}
    print(json.dumps({"model": str(options.model), "tokens": options.tokens, "texts": options.texts} | found))


def logits(model: ContextReady, tokens_BT: Tensor) -> dict[str, dict[str, float]]:
    """Compare streamed logits in several precisions with those in fp32."""
    narrow, rounded, shared = narrowed(model), narrowed(model), narrowed(model, head=False)
    head = model.backbone.unembedding
    assert isinstance(head, nn.Linear)
    rounded.backbone.unembedding = NarrowLinear(head)
    ways = {
        "bf16": narrow,
        "bf16, all logits rounded": rounded,
        "bf16, head in fp32": shared,
        "everything in bf16": copy.deepcopy(model).bfloat16(),
    }
    exact = model.stream(tokens_BT, model.init_state(len(tokens_BT)))[0].log_softmax(-1)
    records = {}
    for name, way in ways.items():
        found = way.stream(tokens_BT, way.init_state(len(tokens_BT)))[0].float().log_softmax(-1)
        chosen = tokens_BT[:, 1:, None]
        records[name] = {
            "divergence": float((exact.exp() * (exact - found)).sum(-1).mean()),
            "other_argmax": float((exact.argmax(-1) != found.argmax(-1)).float().mean()),
            "loss": float((exact - found)[:, :-1].gather(-1, chosen).mean()),
        }
        line = "divergence {divergence:.1e}, another most likely token {other_argmax:.2%}, loss {loss:+.1e}"
        print(f"{name}: {line.format(**records[name])}")
    return records


def prompts(model: ContextReady, tokens_BT: Tensor, new: int) -> list[dict[str, Any]]:
    """Count passes with and without early ones in bf16, and compare z and greedy continuations with the stream's."""
    exact = prefill(model, tokens_BT, solver="sequential")
    expected_BN = continued(model, exact.z_B1C, exact.state, new)
    records = []
    for solver in ("sweep", "jacobi"):
        for tolerance in (TOLERANCE, 1e-3):
            for bf16_passes in ("off", "on"):
                settings = {"solver": solver, "tolerance": tolerance, "bf16_passes": bf16_passes}
                read = prefill(model, tokens_BT, **settings)
                records.append(
                    settings
                    | {
                        "passes": read.info.passes,
                        "in_bf16": read.info.bf16_passes,
                        "certificate": read.info.certificate,
                        "error": float((norms(read.z_B1C - exact.z_B1C) / norms(exact.z_B1C)).max()),
                        "same": float((continued(model, read.z_B1C, read.state, new) == expected_BN).all(1).sum()),
                    }
                )
                line = "{passes:.2f} passes, {in_bf16:.2f} of them in bf16, estimated error {certificate:.1e}, "
                line += "largest error {error:.1e}, {same:.0f} continuations the same"
                print(f"{solver}, tolerance {tolerance:g}, {bf16_passes}: {line.format(**records[-1])}")
    return records


def continued(model: ContextReady, z_B1C: Tensor, state: Any, new: int) -> Tensor:
    """The next tokens (B, N), each the most likely one."""
    logits_B1V, chosen = model.backbone.head(z_B1C), []
    for _ in range(new):
        chosen.append(logits_B1V.argmax(-1))
        logits_B1V, state = model.stream(chosen[-1], state)
    return torch.cat(chosen, dim=1)


if __name__ == "__main__":
    main()
