"""Recipes: YAML files in the package, each a training run by name. Every setting can be changed on the command line.

A file in `recipes/` is one run. A file in `recipes/paper/` is an experiment with the models it lists (and settings of
their own, if any), whose shapes come from `PAPER_MODELS`; `main-85m/owt-d5-c1120` names one, and `owt-d5-c1120` alone
means the first that lists it.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from contextready.data.shards import Data
from contextready.errors import ContextReadyError, nearest
from contextready.model.correction import CORRECTIONS
from contextready.runs.checkpoint import newest_checkpoint, open_checkpoint
from contextready.runs.config import RunConfig, build_run, with_new_names
from contextready.runs.paper_models import PAPER_MODELS
from contextready.runs.tasks import TEXT
from contextready.settings import parse_assignments

FOLDER = Path(__file__).parent.parent / "recipes"
FIRST = ("main-85m", "main-340m", "efficiency", "k10-fixed", "k10-pretrain", "finetune", "pretrain", "token-matched")
"""The order in which experiments claim a model named alone; the others follow by name."""
OF_PASSES = ("passes", "min_passes")
"""Settings of the training that a stream has no use for."""
OF_CORRECTION = (*OF_PASSES, "gradient")
"""Settings of the training that a transformer has no use for."""

Settings = dict[str, Any]


@cache
def paper_experiments() -> dict[str, Settings]:
    """The paper's experiments by name, each with its `models`."""
    experiments = {path.stem: _read(path) for path in sorted((FOLDER / "paper").glob("*.yaml"))}
    return {name: experiments[name] for name in (*FIRST, *(name for name in experiments if name not in FIRST))}


def recipe_names() -> list[str]:
    """Every recipe: the small ones, then the paper's as experiment/model."""
    small = [path.stem for path in sorted(FOLDER.glob("*.yaml"))]
    return small + [f"{name}/{model}" for name, settings in paper_experiments().items() for model in settings["models"]]


def load_recipe(name: str) -> Settings:
    """The settings of a recipe in the package, or of a YAML file of the user's."""
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ContextReadyError(f"There is no recipe file {name}.")
        return {"out": f"runs/{Path(name).stem}"} | _read(Path(name))
    if "/" not in name and (FOLDER / f"{name}.yaml").is_file():
        return {"out": f"runs/{name}"} | _read(FOLDER / f"{name}.yaml")
    experiment, _, model = name.rpartition("/")
    for candidate, settings in paper_experiments().items():
        if experiment in ("", candidate) and model in settings["models"]:
            return _paper_recipe(candidate, model, settings)
    known = [*recipe_names(), *(name.rpartition("/")[2] for name in recipe_names())]
    raise ContextReadyError(f"There is no recipe '{name}'; {nearest(name, known)} (crt train --list shows all.)")


def _paper_recipe(experiment: str, model: str, settings: Settings) -> Settings:
    shape, models = asdict(PAPER_MODELS[model].config), settings["models"]
    rest = {key: value for key, value in settings.items() if key != "models"}
    if isinstance(models, dict):
        rest |= models[model]
    if shape["correction"] is None:
        # A transformer makes one pass; the experiment's K and gradient are its context-ready models'.
        rest = {key: value for key, value in rest.items() if key not in OF_CORRECTION}
    if "task" in rest:
        # The task knows its vocabulary and window, also where its settings are changed.
        del shape["vocab_size"], shape["window"]
    if "init_from" in rest:
        rest["init_from"] = rest["init_from"].format(transformer=model.replace("-d", "-n"))
    return {"out": f"runs/{experiment}/{model}"} | shape | rest


def resolve(recipe: str, words: Sequence[str]) -> RunConfig:
    """A recipe and the `key=value` words after it as a checked run; what is left out comes from data and origin."""
    given = with_new_names(parse_assignments(words))
    settings = load_recipe(recipe) | given
    if given.get("correction", "").lower() == "none":
        # A recipe's K and gradient are its correction's; without one there is a single pass.
        settings = {key: value for key, value in settings.items() if key not in OF_CORRECTION or key in given}
    elif settings.get("gradient") == "bptt":
        for key in OF_PASSES:
            # A recipe's own are for its unroll; who asks for passes does not want the stream.
            if given.get(key, "none").lower() != "none":
                raise ContextReadyError(
                    f"{key}={given[key]} is of parallel passes, and gradient=bptt makes none; set gradient=unroll, or "
                    f"leave {key} out."
                )
    for key in ("data", "out", "init_from", "pretrained"):
        # A path written as a number or a date in YAML is still a path.
        if settings.get(key) is not None:
            settings[key] = str(settings[key])
    if "correction_init" not in settings and (begins := _correction_init(settings)) is not None:
        settings["correction_init"] = begins
    known = any(key in settings for key in ("vocab_size", "pretrained")) or settings.get("task", TEXT) != TEXT
    if not known and "data" in settings:
        settings["vocab_size"] = Data(Path(settings["data"]), verify=()).vocab_size
    return build_run(settings)


def _correction_init(settings: Settings) -> str | None:
    """How a correction begins where nothing is said: as in the run that goes on, or at zero on top of a transformer."""
    begun = newest_checkpoint(Path(settings["out"]))
    if begun is not None:
        return open_checkpoint(begun, verify=False).model_config.correction_init
    start, correction = settings.get("init_from"), settings.get("correction")
    if (
        start is None
        or start.lower() == "none"
        or correction not in CORRECTIONS
        or not CORRECTIONS[correction].parts.has_network
    ):
        return None
    return "zero" if open_checkpoint(Path(start)).native_config.correction is None else None


def _read(path: Path) -> Settings:
    import yaml  # type: ignore[import-untyped]

    try:
        settings = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ContextReadyError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ContextReadyError(f"{path} holds no settings; write one key: value a line.")
    return with_new_names(settings)
