"""A run's data on its machines: rows are tokenized, and data sets at URLs copied, before the run starts."""

from collections.abc import Mapping
from typing import Any

from mini_trainer.data.tokenized.fetched import Found, bring_here, fetch_sets, find_sets, locate_sets, name_source
from mini_trainer.distributed.monitor import RunControl
from mini_trainer.distributed.world import World
from mini_trainer.options import TrainOptions, flatten_options, list_data_sets, replace_options
from mini_trainer.run.raw_rows import find_data, tokenize_rows


def make_data_local(options: TrainOptions, world: World, control: RunControl) -> TrainOptions:
    """The options with local paths of data sets in place of rows and URLs. All ranks call this."""
    options = tokenize_rows(options, world, control)
    with control.slow("the copying of data sets"):
        beside = list_scores(options)
        found = bring_here(list_data_sets(options), world, cache_dir=options.data_cache_dir, beside=beside)
    return replace_options(options, **unwrap(found, options))


def find_local_data(options: TrainOptions) -> dict[str, Any]:
    """What `make_data_local` changes in the options, in a process without others. ValueError if that fails."""
    changes: dict[str, Any] = find_data(options)
    options = replace_options(options, **changes)
    found: Found = find_sets(list_data_sets(options), beside=list_scores(options))
    fetch_sets(found, options.data_cache_dir)
    return changes | unwrap(locate_sets(found, options.data_cache_dir), options)


def list_scores(options: TrainOptions) -> list[str]:
    """Endings of a teacher's files next to data sets."""
    scores = f".{options.teacher.teacher_scores}.scores"
    return [scores, f"{scores}.json"] if options.teacher.teacher_weight else []


def unwrap(paths: Mapping[str, tuple[str, ...]], options: TrainOptions) -> dict[str, Any]:
    """The paths as the options take them: some take only one."""
    values = flatten_options(options)
    return {name: found[0] if isinstance(values[name], str) else found for name, found in paths.items()}


def flatten_with_urls(options: TrainOptions) -> dict[str, Any]:
    """All options by name, with the URLs of data sets that were copied from there."""
    named = {name: tuple(map(name_source, paths)) for name, paths in list_data_sets(options).items() if paths}
    return flatten_options(options) | unwrap(named, options)
