"""Small random models of many families, and helpers of the Hugging Face tests."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contextready.hf.modeling import ContextReadyForCausalLM

SIZES = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_LIKE = {
    **SIZES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA_LIKE),
    "llama-tied": ("llama", LLAMA_LIKE | {"tie_word_embeddings": True}),
    "mistral": ("mistral", LLAMA_LIKE | {"sliding_window": None}),
    "mistral-window": ("mistral", LLAMA_LIKE | {"sliding_window": 5}),
    "qwen2": ("qwen2", LLAMA_LIKE),
    "qwen3-tied": ("qwen3", LLAMA_LIKE | {"tie_word_embeddings": True}),
    "gemma": ("gemma", LLAMA_LIKE),
    "gemma2": ("gemma2", LLAMA_LIKE | {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", LLAMA_LIKE | {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gpt-neox": (
        "gpt_neox",
        {k: v for k, v in LLAMA_LIKE.items() if k not in ("num_key_value_heads", "head_dim")},
    ),
    "gpt2": ("gpt2", SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "opt": (
        "opt",
        SIZES
        | {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    "phi": ("phi", LLAMA_LIKE | {"num_key_value_heads": 4}),
    "olmo2": ("olmo2", LLAMA_LIKE),
    "bloom": ("bloom", SIZES | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("falcon", SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "falcon-alibi": (
        "falcon",
        SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    ),
    "granite": ("granite", LLAMA_LIKE | {"logits_scaling": 3.0}),
    "cohere": ("cohere", LLAMA_LIKE),
    "own": (
        "contextready_base",
        SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "own-window": (
        "contextready_base",
        SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "sliding_window": 5},
    ),
}


def tiny_lm(family: str, seed: int = 0, **changes: Any) -> Any:
    """A small random causal language model, in float64 and with larger weights than usual, so that errors show."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = FAMILIES[family]
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings | changes)).double().eval()
    with torch.no_grad():
        for name, p in lm.named_parameters():
            p.copy_(
                torch.randn_like(p) * (0.1 if p.dim() < 2 else 0.2) + (1.0 if "norm" in name and p.dim() < 2 else 0)
            )
    lm.generation_config.eos_token_id = None
    return lm


def randomise(model: nn.Module, seed: int = 1, std: float = 0.3) -> None:
    """Give the correction random weights; a new correction is zero, so every comparison would succeed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "correction" in name:
                p.copy_(torch.randn_like(p) * std + (1.0 if p.dim() < 2 else 0.0))


def tiny_ready(family: str, seed: int = 0, **settings: Any) -> ContextReadyForCausalLM:
    """A small context-ready model with a random correction, which reads prompts exactly up to rounding."""
    model = ContextReadyForCausalLM.wrap(tiny_lm(family, seed), tolerance=0.0, **settings)
    randomise(model)
    return model


def random_tokens(rows: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    """Tokens that are neither padding nor special."""
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference between two tensors of the same shape."""
    assert a.shape == b.shape
    return float((a - b).abs().max())


BLOCKS = ("model.layers", "model.decoder.layers", "model.native.layers", "gpt_neox.layers", "transformer.h")
"""Names of the blocks in the families, listed here so that the code under test is not used."""


@torch.no_grad()
def oracle(lm: Any, correction: Any, tokens_BT: Tensor) -> Tensor:
    """Logits by definition: x_t from z_{t-1}, then the plain model on all x so far, without a cache."""
    seen: dict[str, Tensor] = {}
    last_block = next(part[-1] for name, part in lm.named_modules() if name in BLOCKS)
    handle = last_block.register_forward_hook(
        lambda module, args, out: seen.update(z=out if torch.is_tensor(out) else out[0])
    )
    e_BTC = lm.get_input_embeddings()(tokens_BT)
    z_B1C, xs, logits = torch.zeros_like(e_BTC[:, :1]), [], []
    for t in range(tokens_BT.shape[1]):
        e_B1C = e_BTC[:, t : t + 1]
        normed_B1C = F.layer_norm(z_B1C + e_B1C, e_B1C.shape[-1:], correction.norm.weight)
        xs.append(e_B1C + F.gelu(normed_B1C @ correction.ffn.up.weight.T) @ correction.ffn.down.weight.T)
        logits.append(lm(inputs_embeds=torch.cat(xs, dim=1), use_cache=False).logits[:, -1:])
        z_B1C = seen["z"][:, -1:]
    handle.remove()
    return torch.cat(logits, dim=1)


KNOWN = 300
"""Vocabulary size of a small tokenizer: all bytes and a few more tokens."""


def train_tokenizer(folder: Path) -> Any:
    """A small byte-level tokenizer, loaded with transformers."""
    from train_helpers import WORDS
    from transformers import PreTrainedTokenizerFast

    from contextready.data.tokenizer import END, Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer.train([" ".join(WORDS) * 3], KNOWN).save(folder)
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, bos_token=END, clean_up_tokenization_spaces=False
    )


def save(folder: Path, lm: Any, tokenizer: Any) -> Path:
    """A Hugging Face folder with a model and its tokenizer."""
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def refused(capsys: Any, *arguments: Any) -> str:
    """A command that ends with one sentence and exit code 2; returns the sentence."""
    from contextready.cli.main import main

    capsys.readouterr()
    assert main([str(word) for word in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"crt {arguments[0]}: ")
    # A sentence, or one that ends with the command to run next.
    assert said.err.endswith((".\n", "?\n", "…\n")) or re.search(r": (crt|pip) [^.]", said.err), said.err
    assert said.err.count("\n") == 1
    return str(said.err)


def refused_conversion(capsys: Any, tmp_path: Path, source: Any, *options: Any) -> str:
    """A refused conversion writes nothing."""
    before = sorted(path.name for path in tmp_path.iterdir())
    said = refused(capsys, "convert", source, tmp_path / "out", *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    return said


def crt(*words: Any) -> str:
    """A command that succeeds; returns what it printed."""
    from contextready.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([str(word) for word in words]) == 0
    return out.getvalue()


def generated(folder: Path) -> str:
    """The text that `crt generate` writes with a model."""
    return crt("generate", folder, "river stone", "--max-tokens", "8", "--seed", "3")


def code_of_card(folder: Path) -> str:
    """The Python code in a folder's README, adapted so that it runs from anywhere."""
    (block,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    assert 'folder = "."' in block
    return str(block).replace('folder = "."', f"folder = {str(folder)!r}")


TEXTS = [
    "river stone light",
    "  two  spaces ",
    "it 's , isn't it ?",
    "naïve — 日本 \N{SNOWMAN}",
    "a\n\n\tb",
    "",
    "0" * 40,
]
"""Texts that a tokenizer must preserve."""


def some_tokens(rows: int = 2, length: int = 9) -> Tensor:
    """Random tokens from the vocabulary of the small tokenizer."""
    return torch.randint(KNOWN, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any, tokens: Tensor, **settings: Any) -> Tensor:
    """The logits of a model, without gradients."""
    found: Tensor = model(tokens, **settings).logits
    return found
