"""What an observer is shown of a whole coordinator: what `tensorhub status` shows of each model,
with what concerns the coordinator itself.

An overview is made in parts, each by a call of its own, so that other work comes between them. A
part costs what one `Describe` costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tensorhub.coordinator import limits
from tensorhub.coordinator.core import Coordinator
from tensorhub.coordinator.states import CoordinatorState, WorkerState
from tensorhub.coordinator.views import Place, describe
from tensorhub.types import ModelInfo

DETAILED_WORKERS_MAX = 64  # of a model of which single workers are told
COUNTED_PER_PART = 2048  # groups, shards and rows; one model is never cut
PAGE_WORKERS = 50


@dataclass(frozen=True, slots=True)
class Overview:
    """One coordinator at one moment, without its models.

    `workers`: by state. `lease_margin_s`: how long the worker that was silent longest still
    counts; None without workers. `recovers_in_s`: until the coordinator knows what there is; 0 once
    it serves. `models`: those that are known.
    """

    cluster: str
    epoch: int
    state: str
    lease_s: float
    sessions: int
    workers: dict[str, int]
    lease_margin_s: float | None
    recovers_in_s: float
    models: int


@dataclass(frozen=True, slots=True)
class ModelOverview:
    """One model, with its replicas and workers if it has at most 64 of these.

    `age_s`: since its newest publication; since this coordinator's start, if that was before it
    (`age_is_least`).
    """

    info: ModelInfo
    age_s: float
    age_is_least: bool


def overview(core: Coordinator, now: float) -> Overview:
    """All but the models: one look at each worker."""
    cluster = core.cluster
    workers = cluster.workers.values()
    live = sum(worker.state is WorkerState.LIVE for worker in workers)
    serves = core.state is CoordinatorState.SERVING
    return Overview(
        cluster=cluster.id,
        epoch=cluster.epoch,
        state=core.state.value,
        lease_s=cluster.options.lease_s,
        sessions=len(cluster.sessions),
        workers={"live": live, "suspect": len(cluster.workers) - live},
        lease_margin_s=min(
            (worker.answers + cluster.options.lease_s - now for worker in workers),
            default=None,
        ),
        recovers_in_s=0.0
        if serves
        else max(0.0, cluster.listens_since + cluster.options.lease_s - now),
        models=len(cluster.models),
    )


def models_shown(core: Coordinator) -> tuple[str, ...]:
    """Whose models an overview tells: first those that have published last, newest first; then
    others, by name.
    """
    cluster = core.cluster
    newest = [name for name in reversed(cluster.newest_models) if name in cluster.models]
    among = islice(cluster.model_names, limits.OVERVIEW_MODELS_MAX)
    others = (name for name in among if name not in cluster.newest_models)
    return tuple([*newest, *others][: limits.OVERVIEW_MODELS_MAX])


def model_overviews(
    core: Coordinator, now: float, names: Sequence[str], rows: int
) -> Iterator[tuple[str, ModelOverview | None]]:
    """Of the first of these models, as many as one part has room for but one at least. None: it is
    forgotten. `rows`: of workers, shards and reads, that there is still room for.
    """
    counted = 0
    for name in names:
        if counted >= COUNTED_PER_PART:
            return
        model = core.cluster.models.get(name)
        if model is None:
            yield name, None
            continue
        info, _ = describe(model, now, workers_max=0)
        assert info.summary is not None
        if info.summary.workers <= DETAILED_WORKERS_MAX and info.summary.rows <= rows:
            info, _ = describe(model, now)
            rows -= info.summary.rows if info.summary is not None else 0
            counted += rows_of(info)
        counted += 1 + (info.summary.groups + info.summary.shards if info.summary else 0)
        shown_at = model.history.shown_at
        since = core.cluster.began_at if shown_at is None else shown_at
        yield name, ModelOverview(info, max(0.0, now - since), shown_at is None)


def rows_of(info: ModelInfo) -> int:
    """How many rows it has."""
    shards = sum(len(replica.shards) for replica in info.replicas)
    return len(info.versions) + shards + len(info.leases) + len(info.workers)


def model_page(
    core: Coordinator, now: float, name: str, after: Place | None
) -> tuple[ModelInfo, bool] | None:
    """A model with its next workers after a place, and whether there are more; on the first page
    with its counts. None: there is no such model.
    """
    model = core.cluster.models.get(name)
    if model is None:
        return None
    info, is_cut = describe(model, now, after=after, workers_max=PAGE_WORKERS)
    if after is None:
        counts, _ = describe(model, now, workers_max=0)
        by_number = {version.version: version.summary for version in counts.versions}
        versions = [replace(each, summary=by_number.get(each.version)) for each in info.versions]
        info = replace(info, summary=counts.summary, versions=tuple(versions))
    return info, is_cut
