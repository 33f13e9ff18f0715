"""A scripted rank. Run as ``collective_rank.py RANK SIZE FD TIMEOUT_S FOLDER WHAT``.

WHAT is ``operations``: everything in `OPERATIONS` is applied to `rank_input`, and the results are saved in FOLDER; or
how rank 1 leaves the others: ``exit``, ``sleep``, ``close``. The errors of the others are saved.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from stoker_engine.parallel.communicator import Communicator, RankLostError
from stoker_engine.parallel.torch_communicator import World

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1), (1, 64), (7, 33), (256, 48), (0, 8), (5,), (2, 3, 17))
#: Widths of the last dimension, by rank; as many are used as there are ranks.
WIDTHS = ((8, 8, 8), (9, 9, 7), (1, 0, 5), (5, 4, 4), (0, 0, 0))


def rank_input(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the rank's input; elements have very different sizes, so that sums depend on their order."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    exponents = torch.randint(-6, 7, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponents).to(dtype)


def operations(ranks: Communicator) -> dict[str, list[torch.Tensor]]:
    """Return results by operation, in the order of `DTYPES` × `SHAPES` or `WIDTHS`."""
    done: dict[str, list[torch.Tensor]] = {name: [] for name in ("sums", "again", "rows", "gathered", "sent")}
    for dtype in DTYPES:
        for shape in SHAPES:
            x = rank_input(ranks.rank, shape, dtype)
            done["sums"].append(ranks.all_reduce(x.clone()))
            done["again"].append(ranks.all_reduce(x.clone()))
            done["rows"].append(torch.cat([x[:0], *(ranks.all_reduce(row.clone()) for row in x.split(1))]))
            done["sent"].append(ranks.broadcast(x.clone()))
        for widths in WIDTHS:
            for rows in (1, 6):
                x = rank_input(ranks.rank, (rows, widths[ranks.rank]), dtype)
                done["gathered"].append(ranks.all_gather(x, widths[: ranks.size]))
    tall = rank_input(ranks.rank, (12, 10), torch.float32).t()  # not contiguous
    done["sums"].append(ranks.all_reduce(tall))
    done["sent"].append(ranks.broadcast(rank_input(ranks.rank, (12, 10), torch.float32).t()))
    done["gathered"].append(ranks.all_gather(rank_input(ranks.rank, (12, 10), torch.float32).t()))
    done["sent"].append(ranks.broadcast(torch.arange(5) + 10 * ranks.rank))
    done["sent"].append(ranks.broadcast(torch.arange(5) % 2 == ranks.rank % 2))
    return done


def main() -> None:
    rank, size, fd, timeout = (int(word) for word in sys.argv[1:5])
    folder, mode = Path(sys.argv[5]), sys.argv[6]
    torch.set_num_threads(1)
    world = World(rank, size, f"file:///proc/self/fd/{fd}", timeout)
    ranks = world.ranks([list(range(size))])
    with torch.inference_mode():
        if mode == "operations":
            torch.save(operations(ranks), folder / f"{rank}.pt")
        elif rank == 1:
            if mode == "close":
                world.close()
            if mode == "exit":
                os._exit(0)
            signal.pause()
        else:
            started = time.monotonic()
            try:
                ranks.all_reduce(torch.ones(4))
                outcome = "nothing was raised"
            except RankLostError as error:
                outcome = str(error)
            (folder / f"{rank}.txt").write_text(f"{time.monotonic() - started} {outcome}")
    world.close()


if __name__ == "__main__":
    main()
