"""The claims as data: their figures are printed where they say, and follow from the tables that they name."""

import re

import paper_helpers
import pytest

from contextready import ContextReadyError
from contextready.paper.claims import claim, claims
from contextready.paper.tables import NAMES, figures_of, table
from contextready.runs.catalog import cache_ratios, entries, millions

needs_source = pytest.mark.skipif(not paper_helpers.SOURCE.is_file(), reason=paper_helpers.REASON)
IDS = [one.id for one in claims()]
SUBJECTS = [
    ("streaming-exact",),
    ("finite-steps",),
    ("geometric-convergence",),
    ("contraction-range",),
    ("token-matched",),
    ("width-trend",),
    ("d12-beats-n13",),
    ("d1-beats-n6", "random-depth", "d1-fine-tuned"),
    ("block-size-trend",),
    ("pointer-all-levels", "pointer-staircase"),
    ("pointer-20-hops",),
    ("conversion-gain", "conversion-transient"),
    ("dedicated-network", "block-head", "tied", "add-against-blind", "concat"),
    ("small-widths",),
    ("k-min",),
    ("decoding-speed", "flat-latency", "cache"),
    ("two-passes-compiled",),
    ("flops", "flops-of-models", "parameters"),
]
"""What other code may refer to: these ids stay."""


def column(name, key):
    """The numbers of a column, without marks such as ~ and *."""
    return [float(re.sub(r"[~*×%,MK]|C²", "", table(name).cells(row)[key])) for row in table(name).rows]


def stated(id):
    """The numbers that a claim states, by what they stand for."""
    return {what: float(re.sub(r"[~×%,MK]|C²", "", figure)) for what, figure in claim(id).figures.items()}


def test_every_subject_has_its_claims():
    assert {id for subject in SUBJECTS for id in subject} <= set(IDS)


def test_claims_rest_on_tables_that_exist():
    assert {name for one in claims() for name in one.tables} <= set(NAMES)


@needs_source
@pytest.mark.parametrize("id", IDS)
def test_figures_are_printed_where_the_claim_says(id):
    one, sections = claim(id), paper_helpers.sections()
    assert one.where
    text = " ".join(paper_helpers.plain(sections[label]) for label in one.where)
    for what, figure in one.figures.items():
        pattern = rf"(?<![\d.A-Za-z]){re.escape(figure)}(?![\d]|\.\d)"
        assert re.search(pattern, text), (what, figure)


def test_claims_on_streaming_and_convergence_follow_from_the_tables():
    k1, k2, k3, k5, k10 = (column("seq", f"k{k}")[2] for k in (1, 2, 3, 5, 10))
    closed = stated("geometric-convergence")
    assert round(100 * (k1 - k2) / (k1 - k5)) == closed["closed by K=2"]
    assert round(100 * (k1 - k3) / (k1 - k5)) == closed["closed by K=3"]
    gaps = [abs(a - b) for a, b in zip(column("seq", "streaming"), column("seq", "k10"), strict=True)]
    assert round(max(gaps), 2) == stated("streaming-exact")["largest difference in PPL"]
    shares, share = column("seq", "correction"), stated("correction-share")
    assert [round(min(shares[:3])), round(max(shares[:3])), shares[-1]] == list(share.values())[:3]
    d23 = column("depth-deep", "k1")[-1] / column("depth-deep", "k5")[-1]
    assert [round(k1 / k5, 2), round(d23, 2)] == list(share.values())[3:]
    d5, d8, d12, d23 = (
        round(a - b, 2) for a, b in zip(column("depth-deep", "k3"), column("depth-deep", "k5"), strict=True)
    )
    assert list(stated("deeper-converges-faster").values()) == [max(d12, d23), d8]
    assert k10 < k5
    assert d5 > d8


def test_differences_follow_from_the_tables():
    ppl = {
        row.model: float(table(name).cells(row)["ppl"]) for name in ("main", "efficiency") for row in table(name).rows
    }
    d5 = stated("d5-beats-n12")
    assert (d5["D=5"], d5["N=12"], d5["N=6"]) == (ppl["owt-d5-c1120"], ppl["owt-n12-c768"], ppl["owt-n6-c1088"])
    assert d5["difference to N=12"] == pytest.approx(d5["D=5"] - d5["N=12"])
    assert d5["difference to N=6"] == pytest.approx(d5["D=5"] - d5["N=6"])
    for id, what, worse, better in (
        ("depth-saturates", "gain in PPL", "owt-n12-c1536", "owt-n24-c1088"),
        ("d12-beats-n13", "gain over N=13 in PPL", "owt-n13-c1024", "owt-d12-c1024"),
        ("d23-against-n24", "gain in PPL", "owt-n24-c1024", "owt-d23-c1024"),
    ):
        assert stated(id)[what] == pytest.approx(ppl[worse] - ppl[better])
    by_correction = column("correction", "ppl")
    assert stated("dedicated-network")["gain in PPL"] == round(by_correction[1] - by_correction[0], 1)
    fixed, random = (float(table("d1").cells(row)["ppl_100k"]) for row in table("d1").rows[1:3])
    assert stated("random-depth")["cost at 100K in PPL"] == pytest.approx(random - fixed)


@pytest.mark.parametrize(
    ("id", "name", "key"),
    [
        ("block-size-trend", "block-size", "delta"),
        ("small-widths", "scale", "delta"),
        ("parameters", "timing", "parameters"),
    ],
)
def test_claims_repeat_a_column(id, name, key):
    assert list(stated(id).values()) == column(name, key)


def test_token_matched_repeats_its_table():
    gains = [-gap for gap in column("token-matched", "delta")]
    assert list(stated("token-matched").values()) == gains + column("token-matched", "crossover")


def test_costs_are_ours_too():
    for id, count in (("flops-of-models", "macs"), ("parameters", "parameters")):
        for what, figure in claim(id).figures.items():
            name = "owt-" + what.lower().replace("=", "").replace(" ", "-")
            (entry,) = entries([name])
            assert millions(getattr(entry.account, count), figure) == figure
    ratios = {row["context_ready"]: f"{row['cache_ratio']:.1f}×" for row in cache_ratios()}
    assert list(claim("cache").figures.values()) == [ratios["owt-d1-c2048"], ratios["owt-d5-c1120"]]


def test_speed_follows_from_the_table():
    d1, n6, d5, n12 = column("timing", "speed")
    assert list(claim("decoding-speed").figures.values()) == [f"{d1 / n6:.1f}×", f"{d5 / n12:.1f}×"]
    assert [f"{1000 / speed:.2f}" for speed in (d1, n6)] == ["1.09", "2.85"]


def test_the_staircase_repeats_its_table():
    levels = [one.figures["levels"] for n in (1, 3, 5, 10, 11, 12) for one in figures_of(f"pointer-n{n}-c256")]
    assert list(claim("pointer-staircase").figures.values()) == levels


def test_an_unknown_claim_is_refused_with_the_nearest():
    with pytest.raises(ContextReadyError, match=r"^There is no claim 'streaming'; did you mean 'streaming-exact'\?$"):
        claim("streaming")


def test_an_id_that_is_used_twice_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "claims.yaml"
    path.write_text("claims:\n- {id: a, claim: b, where: [abstract]}\n- {id: a, claim: c, where: [abstract]}\n")
    monkeypatch.setattr("contextready.paper.claims.FILE", path)
    with pytest.raises(ContextReadyError, match="the id 'a' is used twice"):
        claims.__wrapped__()
