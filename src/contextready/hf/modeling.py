"""Context-ready models for transformers: any causal language model with a correction, and all of `generate`.

Reading T tokens at once runs parallel passes until z changes by no more than the tolerance at any position. T + 1
passes are always exact. Reading a single token is the recurrence itself, so one pass is exact.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from contextready.errors import ContextReadyError
from contextready.hf.backbone import HFBackbone
from contextready.hf.base import BaseTransformerForCausalLM, BaseTransformerModel
from contextready.hf.cache import Feed, Rewind, carrying_layer
from contextready.hf.configuration import BaseTransformerConfig, ContextReadyConfig, of_backbone
from contextready.hf.proof import verified_structure
from contextready.hf.router import router_logits_wanted, router_loss
from contextready.hf.saving import SavesItsCode
from contextready.hf.structure import Structure, cannot_convert, evaluating, proof_tokens, refusing
from contextready.hf.unsupported import WithoutContinuousBatching
from contextready.model.checks import check_passes
from contextready.model.context_ready import ContextReady, Pass
from contextready.model.correction_module import CorrectionModule, build_correction
from contextready.solve.norms import largest_change


class ContextReadyForCausalLM(
    SavesItsCode,
    WithoutContinuousBatching,
    PreTrainedModel,  # type: ignore[misc]
    GenerationMixin,  # type: ignore[misc]
):
    """A causal language model that corrects each token with the previous position's output before the blocks."""

    config_class = ContextReadyConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: ContextReadyConfig, lm: PreTrainedModel | None = None) -> None:
        """Create the model around `lm`, or around a new model described by `config.base_config`."""
        super().__init__(config)
        if lm is None:
            # The code of the folder that describes it is never run for it.
            lm = AutoModelForCausalLM.from_config(config.base_config, trust_remote_code=False)
        if config.structure is None:
            config.structure = verified_structure(lm).as_dict()
        backbone = HFBackbone(lm, Structure.from_dict(config.structure))
        correction = build_correction(
            config.correction,
            backbone,
            config.correction_init,
            config.correction_bias,
            float(config.correction_scale),
            config.correction_gain,
            **of_backbone(config.base_config),
        )
        self.model = ContextReady(backbone, correction)
        self._no_split_modules = getattr(lm, "_no_split_modules", None)
        self.supports_gradient_checkpointing = lm.supports_gradient_checkpointing
        self.post_init()
        # By default, post_init looks for tied weights in direct children only.
        self.all_tied_weights_keys = self.get_expanded_tied_weights_keys(all_submodels=True)

    @classmethod
    def wrap(cls, lm: PreTrainedModel, **settings: Any) -> "ContextReadyForCausalLM":
        """Convert a causal language model in memory; it computes the same function until it is trained.

        `settings` are those of `ContextReadyConfig`: correction, passes, tolerance, …
        """
        config = ContextReadyConfig(base_config=lm.config, structure=verified_structure(lm).as_dict(), **settings)
        config.dtype = lm.dtype
        model = cls(config, lm)
        model.generation_config = lm.generation_config
        model.train(lm.training)
        model._prove()
        return model

    @torch.no_grad()
    def _prove(self) -> None:
        """Compare the logits with those of the wrapped model, bit for bit."""
        tokens_1T = proof_tokens(self.lm)
        with evaluating(self), refusing(self.lm):
            expected_1TV = self.lm(tokens_1T).logits
            found = [self(tokens_1T, passes=1)]
            if self.model.correction.is_untrained:
                found.append(self(tokens_1T))
        if not all(torch.equal(outputs.logits, expected_1TV) for outputs in found):
            raise cannot_convert(self.lm, "its logits changed, although the correction does nothing yet.")

    @property
    def lm(self) -> Any:
        """The wrapped causal language model."""
        backbone = self.model.backbone
        assert isinstance(backbone, HFBackbone)
        return backbone.lm

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens, e."""
        embeddings: nn.Module = self.lm.get_input_embeddings()
        return embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.lm.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The projection to logits."""
        embeddings: nn.Module | None = self.lm.get_output_embeddings()
        return embeddings

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the projection to logits."""
        self.lm.set_output_embeddings(value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        passes: int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Compute logits of the next tokens, and the loss if labels are given.

        `passes` sets K; with K = 1 the wrapped model runs without correction. By default K is `config.passes` in
        training mode. Otherwise passes run until z changes by no more than `config.tolerance` at any position.
        """
        self.refuse_paged_cache(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ContextReadyError("Pass exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.model.backbone.embed(input_ids)
        e_BTC = self.model.correction.dropout(inputs_embeds)
        if past_key_values is None and self._keeps_cache(use_cache, labels, attention_mask, position_ids):
            past_key_values = DynamicCache(config=self.config.get_text_config())
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = _positions(e_BTC, attention_mask, past)
        loss_arguments = {key: kwargs.pop(key) for key in ("num_items_in_batch",) if key in kwargs}
        # The wrapped model would look this setting up in its own configuration.
        if router_logits_wanted(self.lm, kwargs):
            kwargs["output_router_logits"] = True
        feed = Feed(past_key_values, {"attention_mask": attention_mask, "position_ids": position_ids, **kwargs})
        result = self._solve(e_BTC, feed, position_ids, attention_mask, past, passes=passes)
        if past_key_values is not None:
            carrying_layer(past_key_values).remember(result.carried_BTC.detach())

        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.model.backbone.head(result.z_BTC[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, vocab_size=logits_BTV.shape[-1], **loss_arguments)
        outputs = {
            "logits": logits_BTV,
            "past_key_values": past_key_values,
            "hidden_states": getattr(feed.outputs, "hidden_states", None),
            "attentions": getattr(feed.outputs, "attentions", None),
        }
        if kwargs.get("output_router_logits"):
            # Of the last pass, like hidden_states and attentions.
            router_logits = feed.outputs.router_logits
            aux_loss = router_loss(self.lm, router_logits, attention_mask)
            loss = None if loss is None else loss + self.lm.router_aux_loss_coef * aux_loss.to(loss.device)
            return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, router_logits=router_logits, **outputs)
        return CausalLMOutputWithPast(loss=loss, **outputs)

    def _solve(
        self, e_BTC: Tensor, feed: Feed, position_ids: Tensor, attention_mask: Any, past: Any, *, passes: int | None
    ) -> Pass:
        """Run the passes; returns the last one, whose keys and values stay in the cache."""
        T = e_BTC.shape[1]
        carried_BRC = None if feed.cache is None else carrying_layer(feed.cache).carried_BRC
        before_B1C = torch.zeros_like(e_BTC[:, :1]) if carried_BRC is None else carried_BRC[:, -1:].to(e_BTC)
        # A document begins at position 0, even if padding or another document precedes it in the row.
        starts_BT1 = (position_ids == 0)[..., None]

        def recur(e_BTC: Tensor, carried_BTC: Tensor | None, past: Any) -> Pass:
            seen_BTC = None if carried_BTC is None else carried_BTC.masked_fill(starts_BT1, 0.0)
            result: Pass = self.model.recur(e_BTC, seen_BTC, past)
            return result

        if passes is None and self.training:
            passes = self.config.passes
        if passes is not None:
            check_passes(passes)
        if T == 1 and passes != 1:
            return recur(e_BTC, before_B1C, feed)
        if feed.cache is not None:
            feed.rewind = Rewind(feed.cache)
        valid_BT = _newest_columns(attention_mask, T, past)
        unroll = self.model.passes(e_BTC, feed, before_B1C, recur=recur)
        result = next(unroll)
        for _ in range((T + 1 if passes is None else min(passes, T + 1)) - 1):
            before_BTC, result = result.z_BTC, next(unroll)
            if passes is None and largest_change(before_BTC, result.z_BTC, valid_BT) <= self._tolerance(e_BTC.dtype):
                break
        return result

    def _tolerance(self, dtype: torch.dtype) -> float:
        """Largest change that counts as converged; never below what rounding allows."""
        return max(float(self.config.tolerance), 4 * torch.finfo(dtype).eps)

    def _keeps_cache(self, use_cache: bool | None, labels: Any, attention_mask: Any, position_ids: Any) -> bool:
        if use_cache is not None:
            return use_cache
        # Models keep documents that are packed into one row apart only when there is no cache.
        packed = position_ids is not None and attention_mask is None
        return bool(getattr(self.config.base_config, "use_cache", True)) and not (
            self.training or labels is not None or packed
        )

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if model_kwargs.get("past_key_values") is not None:
            carrying_layer(model_kwargs["past_key_values"])

    def create_masks_for_generate(self, config: Any, **kwargs: Any) -> Any:
        """Create the masks as the wrapped model does."""
        make = getattr(self.lm, "create_masks_for_generate", create_masks_for_generate)
        return make(config=self.lm.config, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, CorrectionModule):
            module.initialise(self.config.correction_init)


def _positions(e_BTC: Tensor, attention_mask: Any, past: Any) -> Tensor:
    """Positions of the new tokens, counted from the first token that is not padding."""
    T = e_BTC.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        counted_BT = _newest_columns((attention_mask.long().cumsum(-1) - 1).clamp(min=0), T, past)
        assert counted_BT is not None
        return counted_BT
    return torch.arange(T, device=e_BTC.device).add(past)[None].expand(e_BTC.shape[0], -1)


def _newest_columns(mask_BS: Any, T: int, past: Any) -> Tensor | None:
    """Columns of the T new tokens in a mask over all tokens or over all slots of a static cache."""
    if not isinstance(mask_BS, Tensor) or mask_BS.dim() != 2:
        return None
    first = 0 if mask_BS.shape[1] == T else int(past)
    return mask_BS[:, first : first + T]


AutoConfig.register(BaseTransformerConfig.model_type, BaseTransformerConfig, exist_ok=True)
AutoConfig.register(ContextReadyConfig.model_type, ContextReadyConfig, exist_ok=True)
AutoModelForCausalLM.register(BaseTransformerConfig, BaseTransformerForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(ContextReadyConfig, ContextReadyForCausalLM, exist_ok=True)

__all__ = [
    "BaseTransformerConfig",
    "BaseTransformerForCausalLM",
    "BaseTransformerModel",
    "ContextReadyConfig",
    "ContextReadyForCausalLM",
]
