"""Training a pretrained model with `crt train`: which weights are trained, and how a checkpoint restores the model."""

from typing import Any

import torch
from torch import nn

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.hf.backbone import HFBackbone
from contextready.hf.configuration import of_backbone
from contextready.hf.load import first_line, load_lm, quiet
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.hf.proof import verified_structure
from contextready.hf.sizes import choose_correction, embedding_size
from contextready.hf.structure import Structure
from contextready.hf.tokenizer_settings import read_tokenizer_settings
from contextready.hf.trust import never_asking
from contextready.hf.untrusted import check_settings
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.model.correction import find_correction
from contextready.model.correction_module import build_correction, has_bias
from contextready.model.cost import Account
from contextready.model.macs import correction_macs
from contextready.runs.config import AUTO, PretrainedModelConfig


def start(config: PretrainedModelConfig) -> ContextReady:
    """Load the model to train from pretrained weights; a plain model gets a new correction, or none."""
    loaded = load_lm(config.pretrained)
    _refuse_router_loss(loaded, config.pretrained)
    settings = read_tokenizer_settings(config.pretrained)
    if not isinstance(loaded, ContextReadyForCausalLM):
        backbone = HFBackbone(loaded, verified_structure(loaded))
        backbone.tokenizer_settings = settings
        name = choose_correction(backbone) if config.correction == AUTO else config.correction
        return _prepared(_corrected(backbone, config, name), config)
    inner = loaded.model.backbone
    assert isinstance(inner, HFBackbone)
    inner.tokenizer_settings = settings
    found = loaded.config
    scale = found.correction_scale if config.correction_scale is None else config.correction_scale
    name = found.correction if config.correction == AUTO else config.correction
    ours = {"correction": name, "correction_scale": scale, "correction_gain": config.correction_gain}
    theirs = {key: getattr(found, key) for key in ours}
    if ours == theirs:
        return _prepared(loaded.model, config)
    if not loaded.model.correction.is_untrained:
        key = next(key for key in ours if ours[key] != theirs[key])
        raise ContextReadyError(
            f"{config.pretrained} already has a trained correction with {key}={theirs[key]}; set {key}={theirs[key]}, "
            "or start from the original model."
        )
    return _prepared(_corrected(inner, config, name, scale=scale), config)


def rebuild(config: PretrainedModelConfig, description: dict[str, Any]) -> ContextReady:
    """Build the model that `describe` described, without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    check_settings("The checkpoint's pretrained model", description["base_config"])
    try:
        with quiet(), never_asking(offline=True):
            base = AutoConfig.for_model(**description["base_config"])
            lm = AutoModelForCausalLM.from_config(base, dtype=torch.float32, trust_remote_code=False)
        structure = Structure.from_dict(description["structure"])
    except Exception as error:  # transformers and its configurations raise anything
        raise ContextReadyError(
            f"The checkpoint's pretrained model cannot be built from its description: {first_line(error)}"
        ) from None
    backbone = HFBackbone(lm, structure)
    backbone.tokenizer_settings = description.get("tokenizer")
    # Earlier versions did not describe the correction, because the settings always named it.
    name = description.get("correction", config.correction)
    scale = description.get("correction_scale", 1.0)
    return _prepared(_corrected(backbone, config, name, description["correction_bias"], scale), config)


def describe(model: ContextReady) -> dict[str, Any]:
    """Describe a model for `rebuild`, as plain JSON values."""
    backbone = model.backbone
    assert isinstance(backbone, HFBackbone)
    base = backbone.lm.config.to_dict()
    return {
        "base_config": base,
        "vocab_size": backbone.lm.config.get_text_config().vocab_size,
        "structure": backbone.structure.as_dict(),
        "correction": model.correction.definition.name,
        "correction_bias": has_bias(model.correction),
        "correction_scale": model.correction.scale,
        "generation_config": backbone.lm.generation_config.to_diff_dict(),
        "tokenizer": backbone.tokenizer_settings,
    }


def cost(model: ContextReady) -> Account:
    """Count multiply-accumulates and parameters; a token uses every matrix of the blocks and of the head once."""
    backbone, correction = model.backbone, model.correction.definition.name
    assert isinstance(backbone, HFBackbone)
    inner = backbone.lm.config.get_text_config()
    heads = inner.num_attention_heads
    head_size = _head_size(backbone) or backbone.width // heads
    head = {id(p): p for name in backbone.structure.head for p in backbone.lm.get_submodule(name).parameters()}
    return Account(
        config=ModelConfig(
            vocab_size=inner.vocab_size,
            # The width of attention, which may differ from the model's.
            # Native models need an even head size, others do not.
            width=heads * (head_size + head_size % 2),
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


def _refuse_router_loss(lm: Any, source: str) -> None:
    if getattr(lm.config.get_text_config(), "output_router_logits", False):
        raise ContextReadyError(
            f"{source} asks for a router loss (output_router_logits in config.json), which crt train does not add; set "
            "it to false, or use transformers' Trainer."
        )


def _head_size(backbone: HFBackbone) -> int | None:
    """The size of an attention head, if the configuration states it; the mean if it varies from layer to layer."""
    try:
        size: int | None = getattr(backbone.lm.config.get_text_config(), "head_dim", None)
        return size
    except Exception:  # transformers has an error of its own for such sizes
        keys = [k.shape[-1] for k, _ in backbone.init_cache(1).layers]
        return round(sum(keys) / len(keys))


def _matrices(parameters: Any) -> int:
    return sum(p.numel() for p in parameters if p.dim() == 2)


def _corrected(
    backbone: HFBackbone,
    config: PretrainedModelConfig,
    name: str | None,
    bias: bool = False,
    scale: float | None = None,
) -> ContextReady:
    scale = config.correction_scale if scale is None else scale
    if scale is None:
        scale = embedding_size(backbone.lm) if find_correction(name).parts.has_network else 1.0
    correction = build_correction(
        name,
        backbone,
        config.correction_init,
        bias,
        scale,
        config.correction_gain,
        **of_backbone(backbone.lm.config),
    )
    return ContextReady(backbone, correction)


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
