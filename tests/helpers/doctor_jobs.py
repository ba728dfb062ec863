"""Machines of jobs of several processes, for the doctor, and what it must find on them."""

from __future__ import annotations

from dataclasses import replace

from elastic_mbs.cli.doctor.facts import Facts, Network, Unknown

HOME = Network(("gloo",), "127.0.1.1", ("lo", "eth0"))
JOB = {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_MAX_RESTARTS": "3"}
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def machines(bare: Facts) -> dict[str, tuple[Facts, list[str]]]:
    """Return machines like `bare` on which a job of several processes runs, or may run."""

    def job(**values: str) -> Facts:
        return replace(bare, network=HOME, environment={**bare.environment, **values})

    return {
        "several processes on one machine": (
            job(),
            [
                "ok processes: the backends gloo",
                "note processes: leads to 127.0.1.1; on several machines; one of lo, eth0",
                "ok processes: 600 s; DistributedOptions(timeout=...)",
            ],
        ),
        "a machine in a network": (
            replace(bare, network=replace(HOME, address="10.0.0.7")),
            ["ok processes: at 10.0.0.7"],
        ),
        "a machine without a name": (
            replace(bare, network=replace(HOME, address=Unknown("gaierror: unknown"))),
            ["note processes: gaierror: unknown; GLOO_SOCKET_IFNAME"],
        ),
        "an interface": (
            job(GLOO_SOCKET_IFNAME="eth0"),
            ["ok processes: the interface eth0"],
        ),
        "an interface that is not there": (
            job(GLOO_SOCKET_IFNAME="ib0"),
            ["problem processes: 'ib0' names no interface; lo, eth0; unset"],
        ),
        "sums that never end": (
            job(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
            ["warning processes: TORCH_NCCL_ASYNC_ERROR_HANDLING=0; never ends"],
        ),
        "torchrun": (
            job(**JOB, **FRESH_STORE),
            ["note processes: 127.0.1.1", "ok processes: again up to 3 times"],
        ),
        "torchrun without restarts": (
            job(**JOB | {"TORCHELASTIC_MAX_RESTARTS": "0"}),
            ["warning processes: without --max-restarts; the job ends; --max-restarts 3"],
        ),
        "torchrun with the store of the start before": (
            job(**JOB),
            ["warning processes: the start before; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"],
        ),
        "a network that cannot be looked at": (
            replace(bare, network=Unknown("OSError: n")),
            ["note processes: OSError: n"],
        ),
    }
