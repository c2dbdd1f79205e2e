"""Converts between checkpoints and Hugging Face format, in both directions, bit for bit."""

import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from contextready.data.tokenizer import FILE, Tokenizer
from contextready.errors import ContextReadyError
from contextready.files import staged_folder
from contextready.hf.backbone import HFBackbone
from contextready.hf.families import FromPretrained, NotNativeError, fill, native_backbone
from contextready.hf.finetune import build_lm, describe, merge, origin_of
from contextready.hf.load import first_line, load_tokenizer, native_tokenizer
from contextready.hf.modeling import (
    BaseTransformerConfig,
    BaseTransformerForCausalLM,
    ContextReadyConfig,
    ContextReadyForCausalLM,
)
from contextready.hf.tokenizer_settings import load_with_settings, read_tokenizer_settings
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.runs.checkpoint import Checkpoint, Progress, load_weights, open_checkpoint, write_rest, write_tensors
from contextready.runs.config import PAPER_PASSES, PretrainedModelConfig, TrainConfig
from contextready.runs.passes import largest_passes

LONGEST = 1024
"""Tokens per sequence, unless the model supports fewer positions or another length is requested."""


def from_native(path: Path, best: bool = False) -> tuple[Any, Any]:
    """Convert the model of a run or checkpoint to a Hugging Face model; also returns its tokenizer."""
    checkpoint = open_checkpoint(path, best)
    checkpoint.must_have_learned_text()
    model = checkpoint.model()
    if not isinstance(checkpoint.model_config, ModelConfig):
        return _of_pretrained(checkpoint, model), tokenizer_of_pretrained(checkpoint)
    run = {"config": checkpoint.config, "progress": asdict(checkpoint.progress)}
    tokenizer = _tokenizer(checkpoint.folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    config, train = checkpoint.native_config, checkpoint.config["train"]
    lm = BaseTransformerForCausalLM(
        BaseTransformerConfig.of(config, train["block_size"], run=None if model.is_recurrent else run, **ends)
    )
    load_weights(lm.model.native, dict(model.backbone.named_parameters()), checkpoint.folder)  # type: ignore[attr-defined]
    if not model.is_recurrent:
        return lm.eval(), tokenizer
    ready = ContextReadyForCausalLM.wrap(
        lm,
        correction=config.correction,
        correction_init=config.correction_init,
        correction_bias=config.bias,
        correction_scale=config.correction_scale,
        correction_gain=config.correction_gain,
        passes=largest_passes(train) or PAPER_PASSES,
        run=run,
        **ends,
    )
    load_weights(ready.model.correction, dict(model.correction.named_parameters()), checkpoint.folder)
    return ready.eval(), tokenizer


def to_native(source: Path, model: Any, out: Path) -> Path:
    """Write a model that has a native form as a checkpoint, without optimizer state."""
    is_ready = isinstance(model, ContextReadyForCausalLM)
    lm = model.lm if is_ready else model
    if not isinstance(lm, BaseTransformerForCausalLM):
        return _pretrained_to_native(source, model, out)
    weights = {name: p.detach() for name, p in lm.model.native.named_parameters()}
    if is_ready:
        weights = {f"backbone.{name}": p for name, p in weights.items()}
        weights |= {f"correction.{name}": p.detach() for name, p in model.model.correction.named_parameters()}
    tokenizer = Tokenizer.load(source)
    known = model.config.run or _native_settings(model.config, lm.config, is_ready, tokenizer)
    with staged_folder(out) as staging:
        write_tensors(staging, weights, {})
        write_rest(staging, known["config"], Progress(**known["progress"]), {"cpu": torch.get_rng_state()}, source)
    return out


def _pretrained_to_native(source: Path, model: ContextReadyForCausalLM, out: Path) -> Path:
    """Write a converted model as the checkpoint that `crt train convert` would write before its first step."""
    try:
        backbone = native_backbone(model.lm)
    except NotNativeError as reason:
        raise ContextReadyError(
            f"{source} is a {type(model.lm).__name__} and cannot be written as a native checkpoint, because {reason}. "
            f"Train it as it is with: crt train convert pretrained={source}"
        ) from None
    wrapped, config, tokenizer = model.model.backbone, model.config, Tokenizer.load(source)
    assert isinstance(wrapped, HFBackbone)
    wrapped.tokenizer_settings = read_tokenizer_settings(str(source))
    native = FromPretrained(backbone, model.model.correction, origin_of(wrapped))
    settings = PretrainedModelConfig(
        pretrained=source.name or ".",
        correction=config.correction,
        correction_init=config.correction_init,
        correction_scale=float(config.correction_scale),
        correction_gain=config.correction_gain,
    )
    known = getattr(config.get_text_config(), "max_position_embeddings", None) or TrainConfig.block_size
    train = TrainConfig(data="", out=".", block_size=min(known, LONGEST), passes=str(config.passes))
    with staged_folder(out) as staging:
        write_tensors(staging, {name: p.detach() for name, p in native.named_parameters()}, {})
        write_rest(
            staging,
            {"model": asdict(settings), "train": asdict(train)},
            Progress(tokenizer_sha256=tokenizer.sha256),
            {"cpu": torch.get_rng_state()},
            source,
            described=describe(native),
        )
    return out


def _native_settings(config: Any, base: BaseTransformerConfig, is_ready: bool, tokenizer: Tokenizer) -> dict[str, Any]:
    """Settings of a native model that was created in transformers, without a run."""
    shape = asdict(base.native())
    names = ("correction", "correction_init", "correction_scale", "correction_gain")
    correction = {name: getattr(config, name) for name in names} if is_ready else {}
    passes = str(config.passes) if is_ready else "1"
    train = TrainConfig(data="", out=".", block_size=base.max_position_embeddings, passes=passes)
    return {
        "config": {"model": asdict(ModelConfig(**shape, **correction)), "train": asdict(train)},
        "progress": asdict(Progress(tokenizer_sha256=tokenizer.sha256)),
    }


def _of_pretrained(checkpoint: Checkpoint, model: ContextReady) -> Any:
    """The Hugging Face model that results from training a pretrained model."""
    if checkpoint.config["model"]["tune"] == "lora":
        merge(model)
    for p in model.parameters():
        p.requires_grad_(True)
    backbone, described = model.backbone, checkpoint.described
    assert described is not None
    from transformers import GenerationConfig

    if isinstance(model, FromPretrained):
        assert isinstance(backbone, Transformer)
        lm, structure = build_lm(model.origin)
        fill(lm, backbone)
    else:
        assert isinstance(backbone, HFBackbone)
        lm, structure = backbone.lm, backbone.structure
    try:
        lm.generation_config = GenerationConfig(**described["generation_config"])
    except Exception as error:  # transformers raises several kinds
        raise ContextReadyError(
            f"The generation settings in {checkpoint.folder} are damaged: {first_line(error)}"
        ) from None
    if isinstance(lm, BaseTransformerForCausalLM):
        lm.config.run = None  # describes the run before this one
    name = model.correction.definition.name
    if name is None:
        return lm.eval()
    config = ContextReadyConfig(
        base_config=lm.config,
        structure=structure.as_dict(),
        correction=name,
        correction_init=checkpoint.config["model"]["correction_init"],
        correction_bias=described["correction_bias"],
        correction_scale=model.correction.scale,
        correction_gain=checkpoint.config["model"].get("correction_gain"),
        passes=largest_passes(checkpoint.config["train"]) or PAPER_PASSES,
    )
    ready = ContextReadyForCausalLM(config, lm)
    ready.generation_config = lm.generation_config
    load_weights(ready.model.correction, dict(model.correction.named_parameters()), checkpoint.folder)
    return ready.eval()


def tokenizer_of_pretrained(checkpoint: Checkpoint) -> Any:
    """The tokenizer of the original model, with its settings and chat template."""
    assert checkpoint.described is not None
    settings = checkpoint.described.get("tokenizer")
    if settings is not None:
        return load_with_settings(checkpoint.folder, settings)
    # Version 0.1 kept no settings. The original model is used if it is still there, but not another one of its name.
    name = checkpoint.config["model"]["pretrained"]
    folders = [str(place) for place in checkpoint.places_of(name) if place.exists()]
    source = folders[0] if folders else name
    with suppress(ContextReadyError):
        same = native_tokenizer(source)
        if same is not None and same.sha256 == checkpoint.progress.tokenizer_sha256:
            return load_tokenizer(source)
    print(
        f"Note: {name}, from which {checkpoint.folder} was trained, was not found, so the settings of its tokenizer "
        "and its chat template are missing.",
        file=sys.stderr,
    )
    return _tokenizer(checkpoint.folder)


def _tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    end = Tokenizer.load(folder).end
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / FILE), eos_token=end, bos_token=end, clean_up_tokenization_spaces=False
    )
