"""Every model in the paper's tables, by name, with the figures that the paper prints for it."""

from dataclasses import dataclass

from contextready.model.config import ModelConfig

OWT_VOCABULARY = 32_000
WIKI_VOCABULARY = 16_000


@dataclass(frozen=True)
class PaperModel:
    """One model from the paper."""

    config: ModelConfig
    tables: str
    """Where the paper reports it."""
    context: int
    """The block size that it was trained with."""
    flops: str | None = None
    """The paper's FLOPs per token, as printed."""
    flops_with_head: bool = True
    """Whether that figure includes the prediction head (the Wikipedia tables leave it out)."""
    coefficient: int | None = None
    """The paper's FLOPs in units of C², as printed."""
    parameters: str | None = None
    """The paper's parameter count, as printed."""


def _owt(layers: int, width: int, correction: str | None = None, heads: int = 16) -> ModelConfig:
    # The paper gives 16 heads for its K=10 runs only. The others are those of the author's public notebooks.
    return ModelConfig(OWT_VOCABULARY, width, layers, heads, dropout=0.2, correction=correction)


def _wiki(layers: int, width: int, correction: str | None = None, extra_ffn: bool = False) -> ModelConfig:
    return ModelConfig(WIKI_VOCABULARY, width, layers, 1, extra_ffn=extra_ffn, dropout=0.2, correction=correction)


def _pointer(
    layers: int,
    width: int = 256,
    correction: str | None = None,
    *,
    tables: int = 10,
    keys: int = 5,
    values: int = 10,
    window: int | None = 38,
) -> ModelConfig:
    # Keys of every table, values, and the tokens "=", "|", "Q" and a placeholder.
    return ModelConfig(tables * keys + values + 4, width, layers, heads=4, window=window, correction=correction)


PAPER_MODELS: dict[str, PaperModel] = {
    # Cross-width results and inference timing.
    "owt-d5-c1120": PaperModel(_owt(5, 1120, "add"), "main, timing", 256, flops="121M", parameters="157M"),
    "owt-d6-c1024": PaperModel(_owt(6, 1024, "add"), "main, token-matched", 256, flops="117M"),
    "owt-n6-c1088": PaperModel(_owt(6, 1088), "main, D=1, timing", 256, flops="120M", parameters="155M"),
    "owt-n12-c768": PaperModel(_owt(12, 768), "main, timing", 256, flops="110M", parameters="134M"),
    "owt-n2-c1888": PaperModel(_owt(2, 1888), "main", 256, flops="146M"),
    "owt-n24-c1088": PaperModel(_owt(24, 1088), "main", 256, flops="376M"),
    "owt-n12-c1536": PaperModel(_owt(12, 1536), "main", 256, flops="389M"),
    "owt-d6-c2048": PaperModel(_owt(6, 2048, "add"), "main", 256, flops="401M"),
    "owt-n6-c2176": PaperModel(_owt(6, 2176), "main", 256, flops="411M"),
    # Single layer.
    "owt-d1-c2048": PaperModel(_owt(1, 2048, "add"), "D=1, seq, timing", 1024, flops="149M", parameters="215M"),
    "owt-n1-c2048": PaperModel(_owt(1, 2048), "D=1 (fine-tuned from)", 1024),
    # Correction efficiency, depth progression, fine-tuning.
    "owt-n12-c1024": PaperModel(_owt(12, 1024), "efficiency, fine-tuning", 256, coefficient=144),
    "owt-n13-c1024": PaperModel(_owt(13, 1024), "efficiency", 256, coefficient=156),
    "owt-d12-c1024": PaperModel(_owt(12, 1024, "add"), "efficiency, seq, fine-tuning", 256, coefficient=152),
    "owt-n14-c1024": PaperModel(_owt(14, 1024), "efficiency", 256, coefficient=168),
    "owt-n24-c1024": PaperModel(_owt(24, 1024), "efficiency, fine-tuning", 256, coefficient=288),
    "owt-d23-c1024": PaperModel(_owt(23, 1024, "add"), "efficiency, seq", 256, coefficient=284),
    "owt-d24-c1024": PaperModel(_owt(24, 1024, "add"), "fine-tuning", 256),
    "owt-d5-c1024": PaperModel(_owt(5, 1024, "add", heads=1), "seq", 256),
    # The paper prints C=1024; the run with its perplexity had C=768.
    "owt-d8-c768": PaperModel(_owt(8, 768, "add", heads=1), "seq", 256),
    "owt-n12-c1408": PaperModel(_owt(12, 1408), "fine-tuning", 256),
    "owt-d12-c1408": PaperModel(_owt(12, 1408, "add"), "fine-tuning", 256),
    # Width scaling and token-matched curves.
    "owt-n2-c256": PaperModel(_owt(2, 256, heads=4), "width", 64),
    "owt-d2-c256": PaperModel(_owt(2, 256, "add", heads=4), "width", 64),
    "owt-n2-c512": PaperModel(_owt(2, 512, heads=8), "width", 64),
    "owt-d2-c512": PaperModel(_owt(2, 512, "add", heads=8), "width", 64),
    "owt-n1-c1024": PaperModel(_owt(1, 1024, heads=1), "token-matched", 64),
    "owt-d1-c1024": PaperModel(_owt(1, 1024, "add", heads=1), "token-matched", 64),
    "owt-n2-c1024": PaperModel(_owt(2, 1024), "width, token-matched", 64),
    "owt-d2-c1024": PaperModel(_owt(2, 1024, "add"), "width, token-matched", 64),
    "owt-n3-c1024": PaperModel(_owt(3, 1024), "token-matched", 64),
    "owt-d3-c1024": PaperModel(_owt(3, 1024, "add"), "token-matched", 64),
    "owt-n6-c1024": PaperModel(_owt(6, 1024), "token-matched", 64),
    # Wikipedia: ablations, variants, scale, results.
    "wiki-d3-c446-blind": PaperModel(_wiki(3, 446, "blind"), "corr_ffn, variants", 256, coefficient=44),
    "wiki-n3-c446-hffn": PaperModel(_wiki(3, 446, extra_ffn=True), "corr_ffn", 256, coefficient=44),
    "wiki-d3-c446-block_head": PaperModel(_wiki(3, 446, "block_head"), "corr_ffn", 256, coefficient=36),
    "wiki-n3-c446": PaperModel(
        _wiki(3, 446), "corr_ffn, wikipedia", 256, flops="7.2M", flops_with_head=False, coefficient=36
    ),
    "wiki-d2-c446-blind": PaperModel(_wiki(2, 446, "blind"), "variants", 256, coefficient=32),
    "wiki-d2-c446": PaperModel(_wiki(2, 446, "add"), "variants", 256, coefficient=32),
    "wiki-d2-c446-concat": PaperModel(
        _wiki(2, 446, "concat_z"), "variants, wikipedia", 256, flops="7.2M", flops_with_head=False, coefficient=36
    ),
    "wiki-d3-c446": PaperModel(_wiki(3, 446, "add"), "variants, scale", 256, coefficient=44),
    "wiki-d3-c446-concat": PaperModel(_wiki(3, 446, "concat_z"), "variants", 256, coefficient=48),
    "wiki-n4-c446": PaperModel(_wiki(4, 446), "scale", 256),
    "wiki-d6-c446": PaperModel(_wiki(6, 446, "add"), "wikipedia", 256, flops="15.9M", flops_with_head=False),
    "wiki-n6-c446-hffn": PaperModel(
        _wiki(6, 446, extra_ffn=True), "wikipedia", 256, flops="15.9M", flops_with_head=False
    ),
    "wiki-d5-c768-concat": PaperModel(
        _wiki(5, 768, "concat_z"), "wikipedia", 256, flops="42.5M", flops_with_head=False
    ),
    "wiki-n6-c768": PaperModel(_wiki(6, 768), "wikipedia", 256, flops="42.5M", flops_with_head=False),
    "wiki-d3-c768": PaperModel(_wiki(3, 768, "add"), "scale", 256),
    "wiki-n4-c768": PaperModel(_wiki(4, 768), "scale", 256),
    "wiki-d3-c50-blind": PaperModel(_wiki(3, 50, "blind"), "scale", 256),
    "wiki-n3-c50-hffn": PaperModel(_wiki(3, 50, extra_ffn=True), "scale", 256),
    "wiki-d3-c74-blind": PaperModel(_wiki(3, 74, "blind"), "scale", 256),
    "wiki-n3-c74-hffn": PaperModel(_wiki(3, 74, extra_ffn=True), "scale", 256),
    "wiki-d1-c50-tied": PaperModel(_wiki(1, 50, "tied_norm"), "ablations (in words)", 256),
    "wiki-d1-c50-blind": PaperModel(_wiki(1, 50, "blind"), "k_min", 256),
    # Pointer chasing: T is 10 tables of 3M + 1 tokens, each followed by 2M + 1 tokens of queries, and a final query.
    # The last model has 20 tables without queries. The paper states neither these layouts nor M=10 and M=8.
    **{f"pointer-n{n}-c256": PaperModel(_pointer(n), "pointer", 272) for n in (1, 3, 5, 10, 11, 12)},
    "pointer-d1-c256": PaperModel(_pointer(1, correction="add"), "pointer", 272),
    "pointer-d1-c128": PaperModel(_pointer(1, 128, "add", keys=10, values=20, window=52), "pointer (wave)", 522),
    "pointer-d1-c512": PaperModel(
        _pointer(1, 512, "add", tables=20, keys=8, values=16, window=None), "pointer (20 hops)", 502
    ),
}


@dataclass(frozen=True)
class CachePair:
    """Two models whose cache sizes the paper compares."""

    context_ready: str
    transformer: str
    ratio: str
    """How many times smaller the cache of the context-ready model is, as printed."""


CACHE_PAIRS = (
    CachePair("owt-d5-c1120", "owt-n12-c768", "1.6×"),
    CachePair("owt-d1-c2048", "owt-n6-c1088", "3.2×"),
)
