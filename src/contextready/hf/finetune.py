"""Training a pretrained model with `crt train`: which weights are trained, and how a checkpoint restores the model."""

from typing import Any

import torch
from torch import nn

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.hf.backbone import HFBackbone
from contextready.hf.load import load_lm
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.hf.structure import Structure, find_structure
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.model.correction_module import build_correction, has_bias
from contextready.model.cost import Account
from contextready.model.macs import correction_macs
from contextready.runs.config import PretrainedModelConfig


def start(config: PretrainedModelConfig) -> ContextReady:
    """Load the model to train from pretrained weights; a plain model gets a new correction, or none."""
    loaded = load_lm(config.pretrained)
    if not isinstance(loaded, ContextReadyForCausalLM):
        backbone = HFBackbone(loaded, find_structure(loaded))
        return _prepared(_corrected(backbone, config), config)
    theirs = loaded.config.correction
    if config.correction == theirs:
        return _prepared(loaded.model, config)
    if not loaded.model.correction.is_untrained:
        raise ContextReadyError(
            f"{config.pretrained} already has a trained correction ({theirs}); set correction={theirs}, or start from "
            "the original model."
        )
    inner = loaded.model.backbone
    assert isinstance(inner, HFBackbone)
    return _prepared(_corrected(inner, config), config)


def rebuild(config: PretrainedModelConfig, description: dict[str, Any]) -> ContextReady:
    """Build the model that `describe` described, without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**description["base_config"]), dtype=torch.float32)
    backbone = HFBackbone(lm, Structure.from_dict(description["structure"]))
    return _prepared(_corrected(backbone, config, description["correction_bias"]), config)


def describe(model: ContextReady) -> dict[str, Any]:
    """Describe a model for `rebuild`, as plain JSON values."""
    backbone = model.backbone
    assert isinstance(backbone, HFBackbone)
    base = backbone.lm.config.to_dict()
    return {
        "base_config": base,
        "vocab_size": backbone.lm.config.get_text_config().vocab_size,
        "structure": backbone.structure.as_dict(),
        "correction_bias": has_bias(model.correction),
        "generation_config": backbone.lm.generation_config.to_diff_dict(),
    }


def cost(model: ContextReady, correction: str | None) -> Account:
    """Count multiply-accumulates and parameters; a token uses every matrix of the blocks and of the head once."""
    backbone = model.backbone
    assert isinstance(backbone, HFBackbone)
    inner = backbone.lm.config.get_text_config()
    heads = inner.num_attention_heads
    head_size = getattr(inner, "head_dim", None) or backbone.width // heads
    head = {id(p): p for name in backbone.structure.head for p in backbone.lm.get_submodule(name).parameters()}
    return Account(
        config=ModelConfig(
            vocab_size=inner.vocab_size,
            # The width of attention, which may differ from the model's.
            width=heads * head_size,
            layers=inner.num_hidden_layers,
            heads=heads,
            correction=correction,
        ),
        macs_blocks=_matrices(backbone.lm.get_submodule(backbone.structure.blocks).parameters()),
        macs_correction=correction_macs(correction, backbone.width),
        macs_head=_matrices(head.values()),
        parameters=sum(p.numel() for p in model.parameters()),
        embedding_parameters=backbone.lm.get_input_embeddings().weight.numel(),
        correction_parameters=sum(p.numel() for p in model.correction.parameters()),
    )


def merge(model: ContextReady) -> None:
    """Merge LoRA adapters into the weights they adapt, and remove them."""
    peft = require("peft.tuners.tuners_utils", "hf")
    for name, part in list(model.named_modules()):
        if isinstance(part, peft.BaseTunerLayer):
            part.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, part.get_base_layer())


def _matrices(parameters: Any) -> int:
    return sum(p.numel() for p in parameters if p.dim() == 2)


def _corrected(backbone: HFBackbone, config: PretrainedModelConfig, bias: bool = False) -> ContextReady:
    return ContextReady(backbone, build_correction(config.correction, backbone, config.correction_init, bias))


def _prepared(model: ContextReady, config: PretrainedModelConfig) -> ContextReady:
    """Freeze the weights that are not trained, and add LoRA adapters if they are requested."""
    backbone = model.backbone
    assert isinstance(backbone, HFBackbone)
    if config.tune != "all":
        for p in backbone.parameters():
            p.requires_grad_(False)
    if config.tune == "lora":
        peft = require("peft", "hf")
        adapters = peft.LoraConfig(
            r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules=_linears_in_blocks(backbone)
        )
        peft.inject_adapter_in_model(adapters, backbone.lm)
    for p in model.correction.parameters():
        p.requires_grad_(True)
    return model.train()


def _linears_in_blocks(backbone: HFBackbone) -> list[str]:
    """Full names of all linear layers in the blocks."""
    prefix = backbone.structure.blocks
    blocks = backbone.lm.get_submodule(prefix)
    linear_classes = (nn.Linear, require("transformers.pytorch_utils", "hf").Conv1D)
    return [f"{prefix}.{name}" for name, part in blocks.named_modules() if isinstance(part, linear_classes)]
