"""Finds settings that contradict each other and says what to change."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m3pc.config.schema import Config, Section


def conflicts(config: "Config") -> Iterator[str]:
    """A message for each pair of settings that contradict each other."""
    yield from _in_model(config)
    yield from _in_training(config)
    yield from _between_learners(config)
    yield from _in_fleet(config)


def _in_model(config: "Config") -> Iterator[str]:
    model, masks, horizon = config.model, config.masks, config.planner.horizon
    if model.width % model.heads:
        yield (
            f"model.width is {model.width}, not a multiple of model.heads = {model.heads};"
            f" give a multiple of {model.heads}"
        )
    if model.width % 2:
        yield (
            f"model.width is {model.width}; give an even number: the position embedding has as many"
            " sines as cosines"
        )
    if model.log_sigma_min >= model.log_sigma_max:
        yield (
            f"model.log_sigma_min is {model.log_sigma_min};"
            f" give less than model.log_sigma_max = {model.log_sigma_max}"
        )
    if horizon >= model.window:
        yield f"planner.horizon is {horizon}; give less than model.window = {model.window}"
    if math.floor(model.window * min(masks.keep_ratios)) < 1:
        yield (
            f"masks.keep_ratios has {min(masks.keep_ratios)}, which keeps none of"
            f" model.window = {model.window} steps; give at least 1/{model.window}"
        )
    for path, weights in (("masks.mixture", masks.mixture), ("masks.pivot", masks.pivot)):
        if not any(weights.model_dump().values()):
            yield _no_weight(path, weights)


def _in_training(config: "Config") -> Iterator[str]:
    pretrain, online, replay = config.pretrain, config.online, config.replay
    if pretrain.warmup > pretrain.updates:
        yield (
            f"pretrain.warmup is {pretrain.warmup};"
            f" give at most pretrain.updates = {pretrain.updates}"
        )
    if config.masks.groups > min(pretrain.batch, online.batch):
        yield (
            f"masks.groups is {config.masks.groups}; give at most pretrain.batch ="
            f" {pretrain.batch} and online.batch = {online.batch}"
        )
    if config.dataset.min_length < config.model.window:
        yield (
            f"dataset.min_length is {config.dataset.min_length};"
            f" give at least model.window = {config.model.window}"
        )
    if config.returns.mode == "average" and config.returns.discount != 1:
        yield (
            f"returns.discount is {config.returns.discount};"
            " give 1, or set returns.mode to sum: an average is not discounted"
        )
    if not any(config.loss.weights.model_dump().values()):
        yield _no_weight("loss.weights", config.loss.weights)
    if not online.updates_per_step and not online.updates_per_episode:
        yield "online.updates_per_step is 0; give more, or set online.updates_per_episode above 0"
    if online.lr_end < 1 and online.updates_per_episode:
        yield (
            f"online.lr_end is {online.lr_end}; give 1, or set online.updates_per_episode to 0:"
            " a decay needs the number of updates, which depends on how many episodes there are"
        )
    if replay.online_after > replay.online_transitions:
        yield (
            f"replay.online_after is {replay.online_after}; give at most"
            f" replay.online_transitions = {replay.online_transitions}"
        )


def _between_learners(config: "Config") -> Iterator[str]:
    """Several learners compute the same number of rows each, every one on its own device."""
    learners, groups, device = config.fleet.learners, config.masks.groups, config.compute.device
    if learners == 1:
        return
    if config.online.batch % (groups * learners):
        yield (
            f"online.batch is {config.online.batch}; give a multiple of {groups * learners}:"
            f" fleet.learners = {learners} split each of masks.groups = {groups}"
        )
    if config.critic.batch % learners:
        yield (
            f"critic.batch is {config.critic.batch};"
            f" give a multiple of fleet.learners = {learners}, which split it"
        )
    if device == "mps":
        yield f"fleet.learners is {learners}; give 1, as compute.device is mps"
    if device == "cuda" and config.fleet.learner_gpus < 1:
        yield (
            f"fleet.learner_gpus is {config.fleet.learner_gpus};"
            " give 1: each of several learners on cuda needs a GPU"
        )


def _in_fleet(config: "Config") -> Iterator[str]:
    fleet = config.fleet
    half = math.ceil(fleet.envs_per_actor / 2)  # environments in one request of an actor
    if fleet.queue < half:
        yield (
            f"fleet.queue is {fleet.queue}; give at least {half}: one request plans for half of"
            f" fleet.envs_per_actor = {fleet.envs_per_actor}"
        )
    if fleet.most_actors and fleet.most_actors < fleet.least_actors:
        yield (
            f"fleet.most_actors is {fleet.most_actors}; give at least fleet.least_actors ="
            f" {fleet.least_actors}, or 0 to turn autoscaling off"
        )


def _no_weight(path: str, weights: "Section") -> str:
    names = ", ".join(f"{path}.{name}" for name in type(weights).model_fields)
    return f"{path} has no weight above 0; give at least one to {names}"
