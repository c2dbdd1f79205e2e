"""Configurations registered with Hugging Face's Auto classes: the native transformer, and context-ready models."""

from dataclasses import fields
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from contextready.model.config import TransformerConfig

NEW_NAMES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "window": "sliding_window",
}
"""Settings of the native transformer and their names here; all others have the same name."""
SAME_NAMES = tuple(field.name for field in fields(TransformerConfig) if field.name not in NEW_NAMES)


class BaseTransformerConfig(PretrainedConfig):  # type: ignore[misc]
    """The native transformer (the paper's "roformer") under the names that Hugging Face expects."""

    model_type = "contextready_base"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (the Trainer adds a list to it)

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 4,
        sliding_window: int | None = None,
        max_position_embeddings: int = 1024,
        run: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.sliding_window = sliding_window
        for name in SAME_NAMES:
            setattr(self, name, kwargs.pop(name, getattr(TransformerConfig, name)))
        self.num_key_value_heads = num_attention_heads if self.kv_heads is None else self.kv_heads
        self.head_dim = hidden_size // num_attention_heads if self.head_width is None else self.head_width
        self.max_position_embeddings = max_position_embeddings
        self.run = run
        self.layer_types = ["sliding_attention" if sliding_window else "full_attention"] * num_hidden_layers
        # These follow from the other fields, but older files may contain them.
        for key in ("num_key_value_heads", "head_dim", "layer_types"):
            kwargs.pop(key, None)
        super().__init__(**kwargs | {"tie_word_embeddings": self.tied_embeddings})

    @classmethod
    def of(cls, config: TransformerConfig, max_position_embeddings: int, **kwargs: Any) -> "BaseTransformerConfig":
        """Create the configuration that describes a native transformer."""
        return cls(
            max_position_embeddings=max_position_embeddings,
            **{name: getattr(config, own) for own, name in NEW_NAMES.items()},
            **{name: getattr(config, name) for name in SAME_NAMES},
            **kwargs,
        )

    def native(self) -> TransformerConfig:
        """The same configuration in native form."""
        values = {
            field.name: getattr(self, NEW_NAMES.get(field.name, field.name)) for field in fields(TransformerConfig)
        }
        for field in fields(TransformerConfig):
            # JSON may have written a whole number.
            if field.type is float and isinstance(values[field.name], int):
                values[field.name] = float(values[field.name])
        return TransformerConfig(**values)


def of_backbone(base_config: Any) -> dict[str, Any]:
    """Settings that a correction takes from a native transformer; other models have none."""
    if not isinstance(base_config, BaseTransformerConfig):
        return {}
    native = base_config.native()
    return {"dropout": native.correction_dropout, "weights": native.init}


class ContextReadyConfig(PretrainedConfig):  # type: ignore[misc]
    """A causal language model of any family with a correction."""

    model_type = "contextready"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (the Trainer adds a list to it)

    def __init__(
        self,
        base_config: PretrainedConfig | dict[str, Any] | None = None,
        structure: dict[str, Any] | None = None,
        correction: str = "add",
        correction_init: str = "zero",
        correction_bias: bool = False,
        correction_scale: float = 1.0,
        correction_gain: str | None = None,
        passes: int = 5,
        tolerance: float = 1e-4,
        run: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Describe a context-ready model.

        base_config       configuration of the wrapped causal language model
        structure         names of its parts (`contextready.hf.structure`); if None, they are found when the model is
                          created
        correction        add, balanced, concat, concat_z, blind or block_head; memoryless is the control that sees no
                          past; only a native transformer can have tied and tied_norm
        correction_init   zero (a new model computes the same function as its transformer) or random
        correction_bias   whether the correction has biases
        correction_scale  factor on the output of the correction
        correction_gain   whether that factor is learned: scalar, channel or None
        passes            K in training
        tolerance         largest relative change of z, per position, at which reading a prompt stops
        run               settings and progress of the run, if `crt train` trained the model
        """
        if base_config is None:
            base_config = BaseTransformerConfig()
        if isinstance(base_config, dict):
            base_config = AutoConfig.for_model(**base_config)
        self.base_config: Any = base_config
        self.structure = structure
        self.correction = correction
        self.correction_init = correction_init
        self.correction_bias = correction_bias
        self.correction_scale = correction_scale
        self.correction_gain = correction_gain
        self.passes = passes
        self.tolerance = tolerance
        self.run = run
        # Generation looks for these on the outermost configuration.
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
            kwargs.setdefault(key, getattr(base_config, key, None))
        super().__init__(**kwargs)
        # The base class finds it on the inner configuration through __getattr__ and copies it; one copy is enough.
        self.__dict__.pop("rope_parameters", None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the local path of the inner model."""
        values: dict[str, Any] = super().to_dict()
        values["base_config"].pop("_name_or_path", None)
        return values

    def get_text_config(self, *args: Any, **kwargs: Any) -> PretrainedConfig:
        """The configuration of the wrapped model itself, because masks and caches are created from it."""
        return self.base_config.get_text_config(*args, **kwargs)

    def _get_generation_parameters(self) -> dict[str, Any]:
        # Some families declare settings of generation as their own; those are not this configuration's.
        found: dict[str, Any] = self.base_config._get_generation_parameters()
        return found

    def __getattr__(self, name: str) -> Any:
        # Sizes (vocab_size, hidden_size, num_hidden_layers, …) are those of the wrapped model.
        if name.startswith("_") or name == "base_config" or "base_config" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        try:
            return getattr(self.base_config, name)
        except AttributeError:
            raise
        except Exception as error:
            # Raised for sizes that vary from layer to layer, which callers then treat as missing.
            raise AttributeError(str(error)) from None
