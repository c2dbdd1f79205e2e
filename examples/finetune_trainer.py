"""Fine-tune a context-ready language model with transformers' Trainer: an example script to build on.

    python examples/finetune_trainer.py MODEL TEXT OUT [--tune all|correction|lora] [--steps N] [--control]

MODEL is a folder written by `crt convert`, or any causal language model (a folder or a name on the Hub), which is
converted in memory. TEXT is a .jsonl file with a "text" field per line, or plain text. OUT is the folder to create.
`--control` trains the plain model in the same way, without a correction, as the baseline that the correction must beat.
To use several GPUs: torchrun --standalone --nproc-per-node 8 examples/finetune_trainer.py MODEL TEXT OUT

Requires the extras `data` and `hf` of contextready.
"""

import argparse
from math import exp
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments, set_seed

from contextready.hf.card import write_card
from contextready.hf.convert import describe_costs
from contextready.hf.load import load_model
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.hf.trainer import RandomPasses

BLOCK = 256  # tokens per sequence
BATCH = 8  # sequences per update and device
PASSES = 5  # for every update, K is drawn from 2 to this
RATE = {"all": 1e-4, "correction": 1e-3, "lora": 3e-4}  # learning rate: higher if fewer weights are trained
SEED = 0


def load(source: str, control: bool) -> tuple[Any, Any]:
    """Load the model to train, in float32, and its tokenizer."""
    model, tokenizer = load_model(source)
    is_ready = isinstance(model, ContextReadyForCausalLM)
    if control:
        return (model.lm if is_ready else model), tokenizer
    # A new correction is zero, so the model computes the same function as before until it is trained.
    return (model if is_ready else ContextReadyForCausalLM.wrap(model, passes=PASSES)), tokenizer


def read_blocks(text: Path, tokenizer: Any, length: int) -> tuple[Dataset, Dataset]:
    """Split the text into blocks of tokens: the first 90 % for training, the last 10 % for evaluation."""
    if text.suffix == ".jsonl":
        documents, end = load_dataset("json", data_files=str(text), split="train"), [tokenizer.eos_token_id]
    else:
        documents, end = load_dataset("text", data_files=str(text), split="train", keep_linebreaks=True), []

    def to_blocks(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        rows = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        joined = [token for row in rows for token in row + end]
        blocks = [joined[i : i + length] for i in range(0, len(joined) - length + 1, length)]
        # The model shifts the labels by one itself.
        return {"input_ids": blocks, "labels": blocks}

    blocks = documents.map(to_blocks, batched=True, remove_columns=documents.column_names)
    halves = blocks.train_test_split(test_size=0.1, shuffle=False)
    return halves["train"], halves["test"]


def choose_weights(model: Any, tune: str) -> Any:
    """Freeze the weights that are not trained; for LoRA, add the adapters."""
    is_ready = isinstance(model, ContextReadyForCausalLM)
    if tune == "correction":
        for p in model.lm.parameters():
            p.requires_grad_(False)
    if tune == "lora":
        # Every linear layer of the wrapped model gets an adapter. The correction is small, so all of it is trained:
        # its layers get no adapters, and `modules_to_save` saves it with the adapters.
        correction = {"modules_to_save": ["correction"], "exclude_modules": r".*\.correction\..*"} if is_ready else {}
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", **correction))
    return model


def finetune(source: str, text: Path, out: Path, tune: str = "all", steps: int = 500, control: bool = False) -> Any:
    """Train, evaluate before and after, write OUT, and return the trained model."""
    set_seed(SEED)
    model, tokenizer = load(source, control)
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None) or BLOCK
    train, valid = read_blocks(text, tokenizer, min(BLOCK, known))
    model = choose_weights(model, tune)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out),
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            learning_rate=RATE[tune],
            lr_scheduler_type="cosine",
            warmup_steps=steps // 20,
            bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
            dataloader_pin_memory=torch.cuda.is_available(),
            ddp_find_unused_parameters=False,  # with K of at least 2, every weight has a gradient
            # The activations of all K passes are kept in memory. If memory runs out, add:
            # gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
            # Do not call trainer.evaluate() before trainer.train() instead: with several processes, transformers 5.22
            # would then silently train each one on its own.
            eval_on_start=True,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            seed=SEED,
        ),
        train_dataset=train,
        eval_dataset=valid,
        callbacks=[] if control else [RandomPasses(PASSES)],
    )
    # Evaluation runs passes until they converge, so it measures the loss of generating token by token.
    trainer.train()
    before = trainer.state.log_history[0]["eval_loss"]
    after = trainer.evaluate()["eval_loss"]

    if tune == "lora":
        model = model.merge_and_unload()
    model.eval()
    if trainer.is_world_process_zero():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        measured = {
            "Training": f"tune={tune}, {steps:,} updates.",
            "Before": f"loss {before:.4f}, perplexity {exp(before):.3f}, on {len(valid):,} held-out blocks.",
            "After": f"loss {after:.4f}, perplexity {exp(after):.3f}.",
        }
        on_the_hub = source if not Path(source).exists() else None
        write_card(out, model.config, on_the_hub, [] if control else describe_costs(model), measured)
        print("\n".join(f"{name}: {value}" for name, value in measured.items()))
        print(sample(model, tokenizer, valid[0]["input_ids"][:16]))
    return model


def sample(model: Any, tokenizer: Any, prompt: list[int]) -> str:
    """Continue a prompt with the model."""
    tokens = torch.tensor([prompt], device=model.device)
    written = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=32, do_sample=True)
    return tokenizer.decode(written[0])


def main(arguments: list[str] | None = None) -> None:
    """Run the script with command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, or name on the Hugging Face Hub")
    parser.add_argument("text", type=Path, help=".jsonl or plain text file")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--tune", choices=sorted(RATE), default="all", help="which weights to train (default: all)")
    parser.add_argument("--steps", type=int, default=500, help="number of updates (default: 500)")
    parser.add_argument("--control", action="store_true", help="train the plain model, without a correction")
    options = parser.parse_args(arguments)
    if (options.out / "config.json").exists():
        parser.error(f"{options.out} already contains a model; choose another folder.")
    if options.control and options.tune == "correction":
        parser.error("--control trains a model without a correction; use --tune all or --tune lora with it.")
    finetune(options.model, options.text, options.out, options.tune, options.steps, options.control)


if __name__ == "__main__":
    main()
