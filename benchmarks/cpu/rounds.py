"""The rounds: engines alternate with the same tokens on an idle machine, between measurements of its ceilings."""

from __future__ import annotations

from machine import Machine

from cpu.engines.engine import Running, check_counts
from cpu.environments import CannotRunError
from cpu.models import Model
from cpu.results import Results, Row
from cpu.roofline import least
from cpu.wait_idle import IdleWaiter
from cpu.workloads import counted_tokens, warm_up, workload


def measure(
    model: Model, engines: dict[str, Running], names: list[str], rounds: int, quiet: IdleWaiter, results: Results
) -> None:
    """Add the results of a model's engines to `results`. An engine that fails is dropped."""
    running = dict(engines)

    def drop(engine: str, cause: CannotRunError) -> None:
        print(f"  {engine} is left out from here on: {cause}", flush=True)
        results.left_out[f"{engine}, model {model.name}"] = str(cause)
        del running[engine]

    for engine in [*running]:
        try:
            for seed in range(2):
                running[engine].run(warm_up(seed))
        except CannotRunError as cause:
            drop(engine, cause)
    for number in range(rounds):
        for name in names:
            workload_of_round = workload(name, seed=number)
            order = [*running] if number % 2 == 0 else [*reversed(running)]  # drift affects all engines equally
            noisy, seconds = {}, {}
            quiet.wait()
            before = Machine.measure()
            for engine in order:
                noisy[engine] = not quiet.wait()
                try:
                    finished = running[engine].run(workload_of_round)
                    check_counts(workload_of_round, finished)
                except CannotRunError as cause:
                    drop(engine, cause)
                    continue
                seconds[engine] = finished.seconds
            quiet.wait()
            machine = before.better(Machine.measure())
            results.read_bytes = max(results.read_bytes, machine.read_bytes)
            results.gemm_flops = max(results.gemm_flops, machine.gemm_flops)
            needed = least(workload_of_round, model)
            for engine in engines:
                if engine in seconds:
                    row = results.row(model.name, name, engine)
                    if row is None:
                        row = Row(model.name, name, engine, engines[engine].version)
                        results.rows.append(row)
                    row.speeds.append(counted_tokens(workload_of_round) / seconds[engine])
                    row.shares.append(needed.seconds(machine) / seconds[engine])
                    row.ceiling = needed.ceiling(machine)
                    row.noisy += noisy[engine]
            speeds = ", ".join(
                f"{engine} {counted_tokens(workload_of_round) / taken:.1f}" for engine, taken in seconds.items()
            )
            print(f"  {model.name} {name} round {number + 1} of {rounds}: {speeds} tokens/s", flush=True)
