"""``stoker plan --cluster``: what the kubeconfig's cluster has, has free, and which of it would hold the model.

Each kind of accelerator is planned with the pods that its nodes allow, the smallest that serves first, by the same
planner as everything else; what a kind's row says is what admission would say.
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
    """What the API server said.

    Attributes:
        nodes: all of them.
        holders: every pod that holds devices; None where pods may not be seen.
        unknown: why nothing, or not all, is known.
    """

    nodes: tuple[Node, ...] = ()
    holders: tuple[Holder, ...] | None = None
    unknown: str = ""


@dataclass(frozen=True)
class StockRow:
    """One kind of accelerator, and what it would make of the model.

    Attributes:
        stock: what there is of it.
        count: accelerators of a pod.
        option: how such a pod would share them; None where it is not known or not possible.
        why: why not, or what it does not reach.
    """

    stock: Stock
    count: int
    option: Option | None
    why: str

    @property
    def verdict(self) -> str:
        """A word or two."""
        if self.option is None:
            return "no"
        if self.option.estimate is None:
            return "not known"
        return "serves" if self.option.serves else "holds"


def ask() -> ClusterInventory:
    """The nodes, and every pod that holds devices: all pages of them, whosever they are, that have a node and have not
    ended."""
    # Imported when needed: the Kubernetes client takes a second, and every other plan does without.
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
        return ClusterInventory(nodes, unknown=f"what is free is not known: {error}")
    holders = []
    for live in pods:
        node, phase = live["spec"].get("nodeName"), (live.get("status") or {}).get("phase")
        held = pod_requests(live["spec"]) if node and phase not in ("Succeeded", "Failed") else {}
        if held:
            holders.append(Holder(f"{live['metadata']['namespace']}/{live['metadata']['name']}", node, held))
    return ClusterInventory(nodes, tuple(holders))


def rows(seen: ClusterInventory, manifest: Document, catalogue: Catalogue) -> tuple[StockRow, ...]:
    """Each kind of accelerator that the cluster has.

    Args:
        seen: what is there.
        manifest: the manifest; its accelerator is left aside, and its count and sizes where it states neither.
        catalogue: the kinds that are known.
    """
    return tuple(_row(stock, manifest, catalogue) for stock in stocks(seen.nodes, seen.holders, catalogue))


def table(found: Sequence[StockRow]) -> list[tuple[str, ...]]:
    """The rows to read, titles first."""
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
    """The rows to compute with; null is what is not known."""
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
    """What is made of pods with `count` of the accelerators; or the objection to them."""
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
    """What keeps a manifest from being accepted where the sums are right."""
    return str(found.refused[0]) if found.refused else ""


def _short(found: Study, option: Option) -> str:
    """What a pod does not reach of what is wanted."""
    estimate = option.estimate
    if estimate is None:
        return found.unknown
    if option.serves or estimate.max_model_len is None:
        return ""
    if estimate.max_model_len < found.wanted_len:
        return f"sequences are cut to {estimate.max_model_len:,} of {found.wanted_len:,} tokens"
    return f"too few sequences of {found.wanted_len:,} tokens at once"
