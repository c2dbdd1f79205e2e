"""Training a pretrained model with `crt train`: which weights are trained, and how a checkpoint restores the model."""

from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.hf.backbone import HFBackbone
from contextready.hf.configuration import BaseTransformerConfig, of_backbone
from contextready.hf.families import FromPretrained, NotNativeError, Origin, native_backbone, native_config
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
from contextready.model.cost import Account, account
from contextready.model.macs import correction_macs
from contextready.model.transformer import Transformer
from contextready.runs.config import AUTO, PretrainedModelConfig


def start(config: PretrainedModelConfig, described: dict[str, Any] | None = None) -> ContextReady:
    """Load the model to train from pretrained weights; a plain model gets a new correction, or none.

    `described` is what the checkpoint says about the model, if a run resumes.
    """
    loaded = load_lm(config.pretrained)
    _refuse_router_loss(loaded, config.pretrained)
    model = _with_correction(loaded, config)
    backbone = model.backbone
    assert isinstance(backbone, HFBackbone)
    backbone.tokenizer_settings = read_tokenizer_settings(config.pretrained)
    # Runs of earlier versions resume with the model that they began with.
    if config.tune != "lora" and (described is None or described.get("native", False)):
        model = _native(model)
    return _prepared(model, config)


def _with_correction(loaded: Any, config: PretrainedModelConfig) -> ContextReady:
    """The loaded model with the correction that the settings ask for, or with its own."""
    if not isinstance(loaded, ContextReadyForCausalLM):
        backbone = HFBackbone(loaded, verified_structure(loaded))
        name = choose_correction(backbone) if config.correction == AUTO else config.correction
        return _corrected(backbone, config, name)
    inner = loaded.model.backbone
    assert isinstance(inner, HFBackbone)
    found = loaded.config
    scale = found.correction_scale if config.correction_scale is None else config.correction_scale
    name = found.correction if config.correction == AUTO else config.correction
    ours = {"correction": name, "correction_scale": scale, "correction_gain": config.correction_gain}
    theirs = {key: getattr(found, key) for key in ours}
    if ours == theirs:
        return loaded.model
    if not loaded.model.correction.is_untrained:
        key = next(key for key in ours if ours[key] != theirs[key])
        raise ContextReadyError(
            f"{config.pretrained} already has a trained correction with {key}={theirs[key]}; set {key}={theirs[key]}, "
            "or start from the original model."
        )
    return _corrected(inner, config, name, scale=scale)


def _native(model: ContextReady) -> ContextReady:
    """The same model with a native backbone, if its family has one."""
    backbone = model.backbone
    assert isinstance(backbone, HFBackbone)
    if backbone.lm.config.model_type == BaseTransformerConfig.model_type:
        return model
    with suppress(NotNativeError):
        return FromPretrained(native_backbone(backbone.lm), model.correction, origin_of(backbone))
    return model


def rebuild(config: PretrainedModelConfig, description: dict[str, Any]) -> ContextReady:
    """Build the model that `describe` described, without its weights."""
    origin = Origin(
        base_config=description["base_config"],
        vocab_size=description["vocab_size"],
        structure=description["structure"],
        generation_config=description["generation_config"],
        tokenizer=description.get("tokenizer"),
    )
    backbone: HFBackbone | Transformer
    if description.get("native", False):
        try:
            backbone = Transformer(native_config(read_base_config(origin)))
        except NotNativeError as error:
            raise ContextReadyError(
                f"The checkpoint's pretrained model cannot be built from its description: {error}."
            ) from None
    else:
        backbone = HFBackbone(*build_lm(origin))
        backbone.tokenizer_settings = origin.tokenizer
    # Earlier versions did not describe the correction, because the settings always named it.
    name = description.get("correction", config.correction)
    scale = description.get("correction_scale", 1.0)
    model = _corrected(backbone, config, name, description["correction_bias"], scale)
    if isinstance(backbone, Transformer):
        model = FromPretrained(backbone, model.correction, origin)
    return _prepared(model, config)


def read_base_config(origin: Origin) -> Any:
    """The configuration of the original model; its code, if it has any, is never run."""
    from transformers import AutoConfig

    check_settings("The checkpoint's pretrained model", origin.base_config)
    try:
        with quiet(), never_asking(offline=True):
            return AutoConfig.for_model(**origin.base_config)
    except Exception as error:  # transformers and its configurations raise anything
        raise _damaged(error) from None


def build_lm(origin: Origin) -> tuple[Any, Structure]:
    """Build a model like the original one, without its weights, and find its parts."""
    from transformers import AutoModelForCausalLM

    base = read_base_config(origin)
    try:
        with quiet(), never_asking(offline=True):
            lm = AutoModelForCausalLM.from_config(base, dtype=torch.float32, trust_remote_code=False)
        return lm, Structure.from_dict(origin.structure)
    except Exception as error:  # transformers and its configurations raise anything
        raise _damaged(error) from None


def _damaged(error: Exception) -> ContextReadyError:
    return ContextReadyError(
        f"The checkpoint's pretrained model cannot be built from its description: {first_line(error)}"
    )


def origin_of(backbone: HFBackbone) -> Origin:
    """Describe a pretrained model."""
    lm = backbone.lm
    return Origin(
        base_config=lm.config.to_dict(),
        vocab_size=lm.config.get_text_config().vocab_size,
        structure=backbone.structure.as_dict(),
        generation_config=lm.generation_config.to_diff_dict(),
        tokenizer=backbone.tokenizer_settings,
    )


def describe(model: ContextReady) -> dict[str, Any]:
    """Describe a model for `rebuild`, as plain JSON values."""
    if isinstance(model, FromPretrained):
        origin = model.origin
    else:
        assert isinstance(model.backbone, HFBackbone)
        origin = origin_of(model.backbone)
    return asdict(origin) | {
        "native": isinstance(model, FromPretrained),
        "correction": model.correction.definition.name,
        "correction_bias": has_bias(model.correction),
        "correction_scale": model.correction.scale,
    }


def cost(model: ContextReady) -> Account:
    """Count multiply-accumulates and parameters; a token uses every matrix of the blocks and of the head once."""
    backbone, correction = model.backbone, model.correction.definition.name
    if isinstance(backbone, Transformer):
        return replace(
            account(ModelConfig(**asdict(backbone.config), correction=correction)),
            parameters=sum(p.numel() for p in model.parameters()),
            correction_parameters=sum(p.numel() for p in model.correction.parameters()),
        )
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
    backbone: HFBackbone | Transformer,
    config: PretrainedModelConfig,
    name: str | None,
    bias: bool = False,
    scale: float | None = None,
) -> ContextReady:
    scale = config.correction_scale if scale is None else scale
    of_base = of_backbone(backbone.lm.config) if isinstance(backbone, HFBackbone) else {}
    if scale is None:
        assert isinstance(backbone, HFBackbone)
        scale = embedding_size(backbone.lm) if find_correction(name).parts.has_network else 1.0
    correction = build_correction(
        name,
        backbone,
        config.correction_init,
        bias,
        scale,
        config.correction_gain,
        **of_base,
    )
    return ContextReady(backbone, correction)


def _prepared(model: ContextReady, config: PretrainedModelConfig) -> ContextReady:
    """Freeze the weights that are not trained, and add LoRA adapters if they are requested."""
    backbone = model.backbone
    if config.tune != "all":
        for p in backbone.parameters():
            p.requires_grad_(False)
    if config.tune == "lora":
        assert isinstance(backbone, HFBackbone)
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
