"""``stoker plan --cluster``: the total and free accelerators of the kubeconfig's cluster, and which can hold the model.

For each kind of accelerator, the operator's planner evaluates the pod sizes that the nodes allow, smallest first, until
one suffices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker_operator.api.manifest import parse
from stoker_operator.api.violation import Refused
from stoker_operator.cli.local_config import local_config
from stoker_operator.objects.facts import Node
from stoker_operator.plan.capacity import Holder
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.options import NODE_COUNTS, Option
from stoker_operator.plan.planner import Study, study
from stoker_operator.plan.stock import Stock, stocks

Document = Mapping[str, Any]


@dataclass(frozen=True)
class ClusterInventory:
    """The nodes and pods that the API server lists.

    Attributes:
        nodes: all nodes.
        holders: every pod that occupies devices, or None if pods could not be listed.
        unknown: why nodes or pods could not be listed; empty if they were.
    """

    nodes: tuple[Node, ...] = ()
    holders: tuple[Holder, ...] | None = None
    unknown: str = ""


@dataclass(frozen=True)
class StockRow:
    """One kind of accelerator, with the plan for the model.

    Attributes:
        stock: the cluster's accelerators of this kind.
        count: accelerators of each pod; meaningless without `option`.
        option: the placement in such a pod, or None if no placement is possible or the kind is unknown.
        why: why there is no placement, or what it lacks; may be empty.
    """

    stock: Stock
    count: int
    option: Option | None
    why: str

    @property
    def verdict(self) -> str:
        """``serves`` if the requested length and concurrency fit, ``holds`` if less fits, ``unknown`` without an
        estimate, ``no`` without a placement."""
        if self.option is None:
            return "no"
        if self.option.estimate is None:
            return "unknown"
        return "serves" if self.option.serves else "holds"


def ask() -> ClusterInventory:
    """Read the nodes, and all unfinished pods that occupy devices. `unknown` reports errors."""
    # Imported when needed: the Kubernetes client takes a second to load, and other plans do not use it.
    from stoker_operator.cluster import observe
    from stoker_operator.cluster.kube import Kube, KubeError
    from stoker_operator.plan.pod_requests import pod_requests

    try:
        kube = Kube.connect()
        nodes = tuple(observe.node(each) for each in kube.list("Node").items)
    except KubeError as error:
        return ClusterInventory(unknown=str(error))
    try:
        pods: Sequence[Any] = kube.list("Pod").items
    except KubeError as error:
        return ClusterInventory(nodes, unknown=f"it is unknown which accelerators are free: {error}")
    holders = []
    for live in pods:
        node, phase = live["spec"].get("nodeName"), (live.get("status") or {}).get("phase")
        held = pod_requests(live["spec"]) if node and phase not in ("Succeeded", "Failed") else {}
        if held:
            holders.append(Holder(f"{live['metadata']['namespace']}/{live['metadata']['name']}", node, held))
    return ClusterInventory(nodes, tuple(holders))


def rows(seen: ClusterInventory, manifest: Document, catalogue: Catalogue) -> tuple[StockRow, ...]:
    """Return a row for each kind of accelerator that the cluster has.

    Args:
        seen: the cluster's nodes and pods.
        manifest: the manifest, whose accelerator is replaced by each kind. The planner chooses the count if it is
            absent, and the sizes if all are.
        catalogue: the known kinds of accelerator.
    """
    return tuple(_row(stock, manifest, catalogue) for stock in stocks(seen.nodes, seen.holders, catalogue))


def table(found: Sequence[StockRow]) -> list[tuple[str, ...]]:
    """Return the rows of the table, titles first."""
    lines: list[tuple[str, ...]] = [_TITLES]
    for row in found:
        stock, option = row.stock, row.option
        sizes = option.sizes if option else None
        way = (row.count, sizes.tensor, sizes.pipeline, sizes.data) if sizes else ()
        estimate = option.estimate if option else None
        numbers = (estimate.max_model_len, estimate.max_concurrency) if estimate else (None, None)
        now = stock.pods_now(row.count) if option else 0
        lines.append(
            (
                stock.key or stock.resource,
                *(
                    str(len(stock.sizes)),
                    str(sum(stock.sizes)),
                    _count_text(None if stock.free is None else sum(stock.free)),
                    str(stock.largest),
                ),
                *(map(str, way) if way else ("",) * 4),
                *(map(_count_text, numbers) if option else ("", "")),
                _count_text(now),
                row.verdict,
                row.why,
            )
        )
    return lines


def _count_text(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def document(found: Sequence[StockRow]) -> list[dict[str, Any]]:
    """Return the rows for JSON and YAML. Unknown values are null."""
    return [
        {
            "accelerator": row.stock.key or None,
            "resource": row.stock.resource,
            "nodes": len(row.stock.sizes),
            "total": sum(row.stock.sizes),
            "free": None if row.stock.free is None else sum(row.stock.free),
            "largestNode": row.stock.largest,
            "count": row.count if row.option else None,
            "tensor": row.option.sizes.tensor if row.option else None,
            "pipeline": row.option.sizes.pipeline if row.option else None,
            "data": row.option.sizes.data if row.option else None,
            "maxModelLen": row.option.estimate.max_model_len if row.option and row.option.estimate else None,
            "maxConcurrency": row.option.estimate.max_concurrency if row.option and row.option.estimate else None,
            "podsNow": row.stock.pods_now(row.count) if row.option else 0,
            "verdict": row.verdict,
            "reason": row.why,
        }
        for row in found
    ]


_TITLES = (
    "accelerator", "nodes", "total", "free", "on a node", "count", "TP", "PP", "DP", "max length", "max concurrency",
    "pods now", "verdict", "why",
)  # fmt: skip


def _row(stock: Stock, manifest: Document, catalogue: Catalogue) -> StockRow:
    if not stock.key:
        return StockRow(stock, 0, None, stock.why_unknown)
    count = manifest["spec"]["hardware"].get("count")
    counts = [count] if count else [size for size in NODE_COUNTS if size < stock.largest] + [stock.largest]
    best, reason = None, ""
    for size in counts:
        if size > stock.largest:
            return StockRow(stock, size, None, f"no node has {size}")
        found = _study(stock, manifest, size, catalogue)
        if isinstance(found, str):
            reason = reason or found
            continue
        option = found.advice.option if found.advice else found.chosen
        row = StockRow(stock, size, option, "; ".join(filter(None, (_short(found, option), _no_image(found)))))
        if option.serves or option.estimate is None:
            return row
        if best is None or best.option is None or option.reach > best.option.reach:
            best = row
    return best or StockRow(stock, 0, None, reason)


def _study(stock: Stock, manifest: Document, count: int, catalogue: Catalogue) -> Study | str:
    """Return the study of pods with `count` accelerators, or the violation that forbids them."""
    spec = {**manifest["spec"], "hardware": {**manifest["spec"]["hardware"], "accelerator": stock.key, "count": count}}
    parallelism = spec.get("parallelism") or {}
    if not parallelism.keys() - {"minConcurrency", "mode"}:
        spec["parallelism"] = {**parallelism, "mode": "Auto"}
    label = catalogue.accelerator(stock.key).topology_label
    if label and stock.topology and "template" not in spec:
        spec["template"] = {"spec": {"nodeSelector": {label: stock.topology}}}
    try:
        parsed = parse({**manifest, "spec": spec}).spec
        found = study(parsed, catalogue, local_config(parsed))
    except Refused as refused:
        return str(refused.violations[0])
    kind = catalogue.accelerator(stock.key).images
    served = [runtime for runtime, images in catalogue.runtimes.items() if kind in images]
    against = (*(() if served else found.refused), *found.unplannable)
    return str(against[0]) if against else found


def _no_image(found: Study) -> str:
    """Return why there is no image for these pods; empty if there is one."""
    return str(found.refused[0]) if found.refused else ""


def _short(found: Study, option: Option) -> str:
    """Describe whether an engine misses the requested length or concurrency, or why this is unknown; may be empty."""
    estimate = option.estimate
    if estimate is None:
        return found.unknown
    if option.serves or estimate.max_model_len is None:
        return ""
    if estimate.max_model_len < found.wanted_len:
        return f"sequences are limited to {estimate.max_model_len:,} of {found.wanted_len:,} tokens"
    return f"too few sequences of {found.wanted_len:,} tokens at once"
