"""Captures the CUDA graphs of steps and of their sampling on the current GPU."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from stoker_engine.exec.capture_agreement import CaptureError, agreed
from stoker_engine.exec.finish.sampling_graphs import SamplingGraphs
from stoker_engine.exec.graphs import StepGraphs
from stoker_engine.parallel.communicator import Communicator

logger = logging.getLogger(__name__)


def capture_all(
    steps: StepGraphs,
    sampling: SamplingGraphs | None,
    planned_bytes: int,
    on_progress: Callable[[], None],
    ranks: Communicator,
) -> bool:
    """Capture all graphs on the current GPU, which takes seconds.

    Args:
        steps: graphs of the forward pass.
        sampling: graphs of sampling, which are captured after those of `steps`; None: this stage does not sample. If
            one cannot be captured, there are none.
        planned_bytes: bytes reserved for them. If they take more, a warning is logged.
        ranks: the ranks that share the model, all of which call this.

    Returns:
        Whether those of `steps` were captured; False: the model's forward pass synchronizes with the device, or one of
        several ranks could not capture a graph. Then those of `sampling` are not captured either.
    """
    torch.cuda.empty_cache()
    started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def capture(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        with _forbid_sync():
            compute()  # libraries load kernels at their first launch, which is not allowed in a capture
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            raise CaptureError(str(error).partition("\n")[0]) from error
        return result, graph.replay

    def try_capture(graphs: StepGraphs | SamplingGraphs, ranks: Communicator, warning: str) -> bool:
        try:
            with torch.cuda.stream(stream):  # also for what prepares the inputs of a capture
                graphs.capture(agreed(capture, ranks), on_progress)
        except CaptureError as error:
            logger.warning("%s: %s", warning, error)
            return False
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()  # what the uncaptured steps used
        return True

    if not try_capture(steps, ranks, "CUDA graphs are disabled"):
        return False
    count = sum(map(len, steps.captured.values()))
    if sampling is not None and try_capture(sampling, sampling.ranks, "CUDA graphs of sampling are disabled"):
        count += len(sampling.captured)
    _log_captured(count, time.monotonic() - started, free, planned_bytes)
    return True


def _log_captured(count: int, seconds: float, free_before: int, planned_bytes: int) -> None:
    taken, planned = ((size >> 20) for size in (free_before - torch.cuda.mem_get_info()[0], planned_bytes))
    logger.info("captured %d CUDA graphs in %.1f s; they take %d MiB of %d planned", count, seconds, taken, planned)
    if taken > planned:
        logger.warning(
            "CUDA graphs take %d MiB more than planned; if memory runs out, reduce --gpu-memory-utilization or "
            "--max-num-seqs, or set --enforce-eager",
            taken - planned,
        )


class _SyncError(CaptureError):
    """The host would have waited for the device."""


@contextmanager
def _forbid_sync() -> Iterator[None]:
    """Raise `_SyncError` if the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the mode does not detect all synchronizations yet
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        raise _SyncError(f"the host would wait for the GPU ({reason})") from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
