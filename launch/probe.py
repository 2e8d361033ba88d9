"""`python -m launch.probe`: what this machine has, and which communication between ranks follows from it.

Reads, and tries CUDA IPC with small processes of its own; changes no setting of any GPU. What cannot be found out is
reported by name with the reason, so it works with any number of GPUs, none included.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import click

from launch import machine
from launch.probe_choice import choose
from launch.probe_facts import Facts, Gpu, Host, IpcTrial, Link, Nvshmem
from launch.probe_gpus import ask, count_nvlinks, find_gpus, find_links, load_driver, open_nvml
from launch.probe_ipc import try_ipc
from launch.probe_software import count_torch_gpus, find_nvshmem, kernel_driver_version, package_versions, torch_versions
from launch.probe_table import table
from launch.threads import count_cores

T = TypeVar("T")


class _Notebook:
    """Runs probes and keeps the reasons of those that failed."""

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}

    def find(self, name: str, probe: Callable[[], T], otherwise: T) -> T:
        # Whatever a foreign library raises: a probe that fails is a fact about the machine.
        try:
            return probe()
        except Exception as error:
            self.unknown[name] = str(error) or type(error).__name__
            return otherwise


def probe(ipc_deadline_s: float = 60.0) -> Facts:
    """Look at this machine. Takes a few seconds with GPUs; `ipc_deadline_s` bounds the trial. Never raises for what it
    meets: see `Facts.unknown`."""
    notebook = _Notebook()
    find = notebook.find
    host = probe_host(find)
    gpus: tuple[Gpu, ...] = find("gpus", lambda: find_gpus(load_driver()), ())
    links: tuple[Link, ...] = find("links", lambda: find_links(load_driver(), len(gpus)), ()) if gpus else ()
    if links:
        links = _with_nvlinks(links, find("NVLink lanes", lambda: _ask_nvml(gpus), {}))
    ipc: IpcTrial | None = None
    if gpus:
        devices = [gpu.index for gpu in gpus] if len(gpus) > 1 else [0, 0]
        ipc = find("ipc", lambda: try_ipc(devices, ipc_deadline_s), None)
    return Facts(
        host=host,
        gpus=gpus,
        torch_gpus=find("torch's GPUs", count_torch_gpus, 0),
        links=links,
        ipc=ipc,
        nvshmem=find("NVSHMEM", find_nvshmem, Nvshmem(False, "could not be looked for")),
        versions=_versions(find, bool(gpus)),
        unknown=notebook.unknown,
    )


def probe_host(find: Callable) -> Host:
    """The machine without its GPUs. `find(name, probe, otherwise)` runs a probe that may fail."""
    shm = find("/dev/shm", machine.shared_memory_bytes, (None, None))
    return Host(
        cpu=find("CPU", machine.cpu_name, "not known"),
        num_cores=find("cores", count_cores, os.cpu_count() or 1),
        memory_available_bytes=find("memory", machine.available_memory_bytes, None),
        memory_limit_bytes=find("memory limit", machine.memory_limit_bytes, None),
        shm_bytes=shm[0],
        shm_free_bytes=shm[1],
    )


def _ask_nvml(gpus: tuple[Gpu, ...]) -> dict[tuple[int, int], int]:
    with open_nvml() as nvml:
        return count_nvlinks(nvml, gpus)


def _with_nvlinks(links: tuple[Link, ...], lanes: dict[tuple[int, int], int]) -> tuple[Link, ...]:
    return tuple(replace(link, num_nvlinks=lanes.get((link.first, link.second))) for link in links)


def _versions(find: Callable, has_gpus: bool) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"NVIDIA driver": kernel_driver_version(), "driver's CUDA": None}
    if has_gpus:
        versions["driver's CUDA"] = find("driver's CUDA", _driver_cuda_version, None)
    versions.update(find("torch's versions", torch_versions, {}))
    versions.update(find("package versions", package_versions, {}))
    return versions


def _driver_cuda_version() -> str:
    number = ask(load_driver().cuDriverGetVersion)  # 13000 is 13.0
    return f"{number // 1000}.{number % 1000 // 10}"


@click.command(help="Show what this machine has and which communication between ranks follows from it.")
@click.option("--json", "is_json", is_flag=True, help="One JSON document in place of the table.")
@click.option("--ranks", type=click.IntRange(1), help="How many ranks [default: one a GPU, two without GPUs].")
@click.option("--deadline", default=60.0, show_default=True, help="Seconds for the trial of CUDA IPC.")
def main(is_json: bool, ranks: int | None, deadline: float) -> None:
    facts = probe(deadline)
    choice = choose(facts, ranks)
    if is_json:
        document = {**facts.as_json(), "choice": {"name": choice.name, "reasons": choice.reasons}}
        click.echo(json.dumps(document, indent=1))
    else:
        click.echo(table(facts, choice))


if __name__ == "__main__":
    main()
