"""The native transformer as a Hugging Face model: native blocks and weights, Hugging Face caches and masks."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from contextready.hf.configuration import BaseTransformerConfig
from contextready.hf.saving import SavesItsCode
from contextready.hf.unsupported import WithoutContinuousBatching
from contextready.model.attention import KV, Attend
from contextready.model.config import TransformerConfig
from contextready.model.transformer import Block, Transformer


class BaseTransformerPreTrained(PreTrainedModel):  # type: ignore[misc]
    """What both classes declare to Hugging Face."""

    config_class = BaseTransformerConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ("Block",)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Transformer):
            module.initialise()


class BaseTransformerModel(BaseTransformerPreTrained):
    """Embedding, blocks and final norm; works with any Hugging Face cache."""

    def __init__(self, config: BaseTransformerConfig) -> None:
        super().__init__(config)
        self.native = Transformer(config.native())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens, e."""
        embedding: nn.Module = self.native.embedding
        return embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding of tokens."""
        self.native.embedding = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the last hidden state: z after the final norm."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.native.embed(input_ids)
        x_BTC = inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(x_BTC.shape[1], device=x_BTC.device) + past)[None]
        mask_of = create_sliding_window_causal_mask if self.config.sliding_window else create_causal_mask
        mask_B1TS = mask_of(
            config=self.config,
            inputs_embeds=x_BTC,
            attention_mask=_mask_for_layers(attention_mask, self.config),
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        z_BTC, _ = self.native.blocks(x_BTC, _HuggingFacePast(past_key_values, position_ids, mask_B1TS))
        return BaseModelOutputWithPast(self.native.final_norm(z_BTC), past_key_values)


class BaseTransformerForCausalLM(
    SavesItsCode,
    WithoutContinuousBatching,
    BaseTransformerPreTrained,
    GenerationMixin,  # type: ignore[misc]
):
    """The native transformer with a language-modelling head."""

    _tied_weights_keys = {"model.native.unembedding.weight": "model.native.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: BaseTransformerConfig) -> None:
        super().__init__(config)
        self.model = BaseTransformerModel(config)
        self.post_init()

    @property
    def last_block(self) -> Block:
        """The last block, whose weights some corrections use."""
        return self.model.native.last_block

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens, e."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding of tokens."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """The projection from normalised z to logits."""
        return self.model.native.unembedding

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the projection to logits."""
        self.model.native.unembedding = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss if labels are given."""
        self.refuse_paged_cache(kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.model.native.unembedding(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=outputs.past_key_values)


class _HuggingFacePast:
    """A Hugging Face cache (or none) in the form that the native blocks expect."""

    def __init__(self, cache: Cache | None, positions_BT: Tensor, mask_B1TS: Tensor | None) -> None:
        self.cache, self.positions_BT, self.mask_B1TS = cache, positions_BT, mask_B1TS

    def attend(self, config: TransformerConfig, x_BTC: Tensor) -> "_HuggingFaceAttend":
        """Create the attention over the cache and the new tokens."""
        return _HuggingFaceAttend(config, x_BTC, self)


class _HuggingFaceAttend(Attend):
    """Attention over everything that a Hugging Face cache returns; the mask hides what a token must not see."""

    def __init__(self, config: TransformerConfig, x_BTC: Tensor, past: _HuggingFacePast) -> None:
        self.set_positions(config, past.positions_BT, x_BTC.dtype)
        self.cache, self.mask = past.cache, past.mask_B1TS
        self.causal = self.mask is None and x_BTC.shape[1] > 1

    def join(self, layer: int, k_BHTE: Tensor, v_BHTE: Tensor) -> KV:
        """Append the new keys and values to the cache and return all of them."""
        if self.cache is None:
            return k_BHTE, v_BHTE
        joined: KV = self.cache.update(k_BHTE, v_BHTE, layer)
        return joined


def _mask_for_layers(attention_mask: Any, config: BaseTransformerConfig) -> Any:
    """Pick the mask of this model's layers if generation created one for every layer type."""
    return attention_mask[config.layer_types[0]] if isinstance(attention_mask, dict) else attention_mask
