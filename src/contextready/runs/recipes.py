"""Recipes: named training runs, as YAML files in the package. Every setting can be changed on the command line.

A file in `recipes/` is one run. A file in `recipes/paper/` is an experiment. It lists models, whose shapes come from
`PAPER_MODELS`, and settings for all or for single models. `main-85m/owt-d5-c1120` names a model of an experiment;
`owt-d5-c1120` alone means the first experiment that lists the model. The word `authors=true` after it applies the
settings of the author's own runs.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from contextready.data.batches import Sequences
from contextready.data.shards import Data
from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import shown
from contextready.formats.yaml_file import read_yaml
from contextready.model.config import ModelConfig
from contextready.model.correction import CORRECTIONS
from contextready.runs import authors
from contextready.runs.checkpoint import newest_checkpoint, open_checkpoint
from contextready.runs.config import (
    MODEL_KEYS,
    PRETRAINED_KEYS,
    PretrainedModelConfig,
    RunConfig,
    build_run,
    with_new_names,
)
from contextready.runs.paper_models import OWT_VOCABULARY, PAPER_MODELS, WIKI_VOCABULARY
from contextready.runs.tasks import TEXT
from contextready.settings import parse_assignments

FOLDER = Path(__file__).parent.parent / "recipes"
FIRST = ("main-85m", "main-340m", "efficiency", "k10-fixed", "k10-pretrain", "finetune", "pretrain", "token-matched")
"""The experiments to search first for a model that is named alone; the others follow in alphabetical order."""
OF_PASSES = ("passes", "convergence_weight")
"""Training settings that do not apply to gradient=bptt."""
OF_CORRECTION = (*OF_PASSES, "gradient", "truncated_passes", "correction_lr")
"""Training settings that do not apply to a transformer."""
OF_PRETRAINED = set(PRETRAINED_KEYS) - set(MODEL_KEYS)
"""Settings that only a pretrained model has."""
EXAMPLES = {"data": "data/mini", "out": "runs/mine", "init_from": "runs/mini-n1", "pretrained": "smollm2-crt"}
"""What the settings that name a folder look like."""
FILES = "FILES"
"""Stands for the user's own text files in a suggested command."""


class Corpus(NamedTuple):
    """The data that a recipe is designed for."""

    source: str
    """Name of the corpus in `crt data prepare`."""
    vocab_size: int
    options: str = ""
    """Further options of `crt data prepare`."""


CORPORA = {
    "data/mini": Corpus("default", 4096),
    "data/small": Corpus("default", 1024),
    "data/owt32k": Corpus("openwebtext", OWT_VOCABULARY),
    "data/wiki16k": Corpus("wikipedia", WIKI_VOCABULARY),
    "runs/demo/data": Corpus("default", 1024, " --val-fraction 0.05"),
}
"""What the recipes' data folders are prepared from."""

Settings = dict[str, Any]


@cache
def paper_experiments() -> dict[str, Settings]:
    """Return the paper's experiments by name, each with its `models`."""
    experiments = {path.stem: _read(path) for path in sorted((FOLDER / "paper").glob("*.yaml"))}
    return {name: experiments[name] for name in (*FIRST, *(name for name in experiments if name not in FIRST))}


def recipe_names() -> list[str]:
    """Return the names of all recipes: the small ones, then the paper's as experiment/model."""
    small = [path.stem for path in sorted(FOLDER.glob("*.yaml"))]
    return small + [f"{name}/{model}" for name, settings in paper_experiments().items() for model in settings["models"]]


def load_recipe(name: str, as_author: bool = False) -> Settings:
    """Return the settings of a recipe in the package, or of the user's own YAML file.

    With `as_author`, a recipe of the paper has the settings of the author's own runs.
    """
    own = "/" not in name and (FOLDER / f"{name}.yaml").is_file()
    if as_author and (own or _is_file(name)):
        raise ContextReadyError(
            f"authors=true applies to the recipes of the paper, not to {shown(name)}; leave it out (crt train --list "
            "shows all recipes)."
        )
    if _is_file(name):
        if not Path(name).exists():
            raise ContextReadyError(f"There is no recipe file {shown(name)}.")
        return {"out": f"runs/{Path(name).stem}"} | _read(Path(name))
    if own:
        return {"out": f"runs/{name}"} | _read(FOLDER / f"{name}.yaml")
    experiment, _, model = name.rpartition("/")
    for candidate, settings in paper_experiments().items():
        if experiment in ("", candidate) and model in settings["models"]:
            return _paper_recipe(candidate, model, settings, as_author)
    if name in paper_experiments():
        models = [f"{name}/{model}" for model in paper_experiments()[name]["models"]]
        count = "one model" if len(models) == 1 else f"{len(models)} models"
        raise ContextReadyError(
            f"{name} is an experiment with {count}; choose one of them, for example {' or '.join(models[:2])} "
            "(crt train --list shows all)."
        )
    known = dict.fromkeys([*recipe_names(), *(name.rpartition("/")[2] for name in recipe_names())])
    raise ContextReadyError(
        f"Unknown recipe '{shown(name)}'; {nearest(name, list(known))} Run crt train --list to see all."
    )


def _is_file(recipe: str) -> bool:
    return recipe.endswith((".yaml", ".yml"))


def _paper_recipe(experiment: str, model: str, settings: Settings, as_author: bool) -> Settings:
    shape, models = asdict(PAPER_MODELS[model].config), settings["models"]
    own = models[model] if isinstance(models, dict) else {}
    rest = settings | own
    if as_author:
        sections = [part[authors.SWITCH] for part in (settings, own) if authors.SWITCH in part]
        if "task" in rest and not sections:
            raise ContextReadyError(f"There are no settings of the author for {experiment}/{model}; leave authors out.")
        rest |= authors.authors_settings(shape, "task" not in rest)
        for section in sections:
            rest |= section
    rest = {key: value for key, value in rest.items() if key not in ("models", authors.SWITCH)}
    if shape["correction"] is None:
        # K, the gradient and the conversion are meant for the context-ready models of the experiment.
        rest = {
            key: value for key, value in rest.items() if key not in (*OF_CORRECTION, "init_from", "correction_init")
        }
    if "task" in rest:
        # The task determines the vocabulary and the window, even if its settings are changed.
        del shape["vocab_size"], shape["window"]
    if "init_from" in rest:
        rest["init_from"] = rest["init_from"].format(transformer=model.replace("-d", "-n"))
    rest["out"] = f"runs/{experiment}/{model}"
    if as_author:
        rest |= {key: authors.in_folder(rest[key]) for key in ("out", "init_from") if key in rest}
    return shape | rest


def resolve(recipe: str, words: Sequence[str]) -> RunConfig:
    """Turn a recipe and the `key=value` words after it into a checked run.

    A vocabulary size that is not set comes from the data. If that does not exist yet, it is the size that the recipe is
    designed for, so that a run can be planned without data. Call `check_inputs` before training.
    """
    given = _given(words)
    recipe_settings = load_recipe(recipe, authors.is_on(given.pop(authors.SWITCH, "false")))
    settings = recipe_settings | given
    if given.get("correction", "").lower() == "none":
        # K and the gradient of the recipe are meant for its correction; without one there is a single pass.
        settings = {key: value for key, value in settings.items() if key not in OF_CORRECTION or key in given}
    elif settings.get("gradient") == "bptt":
        for key in OF_PASSES:
            # Passes in the recipe are meant for other modes and are ignored; passes given by the user are an error.
            if given.get(key, "none").lower() != "none":
                raise ContextReadyError(
                    f"{key}={given[key]} does not apply to gradient=bptt, which makes no parallel passes; set "
                    f"gradient=truncated, or leave {key} out."
                )
            settings.pop(key, None)
    on_text = settings.get("task", TEXT) == TEXT
    for key in EXAMPLES:
        if key in settings:
            optional = key in ("init_from", "pretrained") or (key == "data" and not on_text)
            settings[key] = _path(key, settings[key], optional)
    settings = _beginning(settings) | settings
    # A pretrained model and a task have their own vocabulary.
    of_text = on_text and not settings.keys() & OF_PRETRAINED
    if of_text and "vocab_size" not in settings and "data" in settings:
        settings["vocab_size"] = _vocab_size(settings["data"], recipe_settings)
    return build_run(settings)


def _path(key: str, value: Any, may_be_none: bool) -> str | None:
    """Return the path that a setting names, checked before the file system sees it."""
    if value is None and may_be_none:
        return None
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ContextReadyError(f"{key} is empty; name a folder, for example {key}={EXAMPLES[key]}.")
    # YAML reads some names as numbers, dates or booleans, and their text is lost: 12:30 is 750, and no is false.
    if not isinstance(value, str):
        raise ContextReadyError(f"{key} must be text, but got {shown(value)}; write the name in quotes.")
    if "\0" in value:
        raise ContextReadyError(f"{key} contains a null character; choose another name.")
    return value


def _given(words: Sequence[str]) -> dict[str, str]:
    return with_new_names(parse_assignments(words))


def _vocab_size(folder: str, recipe: Settings) -> int:
    """Return the vocabulary size of the data, or the one that the recipe is designed for if there is no data yet."""
    corpus = CORPORA.get(str(recipe.get("data")))
    if Path(folder).is_dir():
        return Data(Path(folder), verify=()).vocab_size
    if corpus is None:
        raise ContextReadyError(
            f"There is no prepared data at {folder}, so the vocabulary size is unknown. Prepare the data with "
            f"crt data prepare {shlex.quote(folder)} {FILES} --vocab-size SIZE, or set vocab_size=SIZE."
        )
    return corpus.vocab_size


def check_inputs(recipe: str, words: Sequence[str], config: RunConfig, missing_ok: bool = False) -> None:
    """Raise an error if a resolved run lacks its data or initial weights, or if the data has another vocabulary.

    `words` are the settings that `resolve` was called with. A user who sets `vocab_size` may choose any size that the
    data fits into.
    """
    folder, model, origin = Path(config.train.data), config.model, config.train.init_from
    begun = newest_checkpoint(Path(config.train.out)) is not None
    if origin is not None and not (missing_ok or begun or Path(origin).exists()):
        command = authors.train_command(origin, recipe_names())
        hint = "" if command is None else f" Train it first with: {command}"
        raise ContextReadyError(f"There is no run or checkpoint at {origin}, which init_from names.{hint}")
    if config.task is not None:
        return
    if not folder.is_dir():
        if missing_ok:
            return
        raise ContextReadyError(
            f"There is no prepared data at {folder}. Prepare it with: {_prepare_command(recipe, config)}"
        )
    if not isinstance(model, ModelConfig):
        return
    data = Data(folder, verify=())
    size = data.vocab_size
    if not missing_ok:
        # A sequence longer than the data is reported as such, not as too large for the memory.
        Sequences(data.tokens("train"), config.train.block_size)
    if "vocab_size" in _given(words) or _is_file(recipe):
        if size > model.vocab_size:
            raise ContextReadyError(
                f"vocab_size={model.vocab_size} is too small for {folder}, which has a vocabulary of {size:,}; set it "
                f"to {size} or more."
            )
    elif size != model.vocab_size:
        raise ContextReadyError(
            f"{folder} has a vocabulary of {size:,}, but the recipe {recipe} is for {model.vocab_size:,}; use data "
            f"prepared with --vocab-size {model.vocab_size}, or set vocab_size={size}."
        )


def _prepare_command(recipe: str, config: RunConfig) -> str:
    """Return the command that prepares the data of a run."""
    folder, model = str(Path(config.train.data)), config.model
    command = f"crt data prepare {shlex.quote(folder)}"
    if isinstance(model, PretrainedModelConfig):
        return f"{command} {FILES} --tokenizer {shlex.quote(model.pretrained)}"
    corpus = CORPORA.get(folder) if folder == load_recipe(recipe).get("data") else None
    source, options = (FILES, "") if corpus is None else (corpus.source, corpus.options)
    return f"{command} {source} --vocab-size {model.vocab_size}{options}"


def _beginning(settings: Settings) -> Settings:
    """Return how the correction begins where it is not set: as in the run to resume or to start from."""
    begun, start = newest_checkpoint(Path(settings["out"])), settings.get("init_from")
    if begun is not None:
        model = open_checkpoint(begun, verify=False).model_config
        return {key: getattr(model, key) for key in ("correction_init", "correction_scale", "correction_gain")}
    if start is None or not Path(start).exists():
        return {}
    origin, name = open_checkpoint(Path(start)).native_config, settings.get("correction")
    if origin.correction is None:
        starts_at_zero = isinstance(name, str) and name in CORRECTIONS and CORRECTIONS[name].parts.has_network
        return {"correction_init": "zero"} if starts_at_zero else {}
    return {"correction_scale": origin.correction_scale, "correction_gain": origin.correction_gain}


def _read(path: Path) -> Settings:
    settings = read_yaml(path)
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ContextReadyError(f"{path} contains no settings; write one key: value per line.")
    return with_new_names(settings)
