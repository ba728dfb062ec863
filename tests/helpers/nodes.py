"""Two nodes on this machine, each with an agent of torchrun: network namespaces, or loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.helpers.room import ROOT

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # in namespaces that are made here, which nobody else sees


class Node:
    """A node, and the agent that runs on it.

    Attributes:
        output: what its agent and its rank have printed.
    """

    def __init__(self, number: int, space: str | None) -> None:
        self._number, self._space = number, space
        self._agent: subprocess.Popen[bytes] | None = None
        self.output = Path()

    def start(
        self, folder: Path, *arguments: str, port: int, restarts: int = 0, nodes: int = 2
    ) -> None:
        """Start an agent of a job of two ranks, which run `tests.helpers.ddp_train`."""
        address, first = ("127.0.0.1", "127.0.0.1")
        command: list[str] = []
        if self._space is not None:
            address, first = ADDRESSES[self._number], ADDRESSES[0]
            command = ["ip", "netns", "exec", self._space]
        command += [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)]
        command += ["--nproc-per-node", str(2 // nodes), "--max-restarts", str(restarts)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{port}"]
        # No name server knows these addresses.
        command += ["--rdzv-conf", f"is_host={int(self._number == 0)}", "--local-addr", address]
        command += ["--monitor-interval", "0.1", "-m", "tests.helpers.ddp_train", str(folder)]
        self.output = folder / f"node{self._number}.txt"
        with self.output.open("w") as output:
            self._agent = subprocess.Popen(
                [*command, *arguments],
                cwd=ROOT,
                env=os.environ
                | {
                    "PYTHONPATH": str(ROOT),
                    "GLOO_SOCKET_IFNAME": "eth0" if self._space else "lo",
                    "OMP_NUM_THREADS": "1",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as docs/distributed.md says
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int:
        """Return the exit code of the agent."""
        assert self._agent is not None
        return self._agent.wait(seconds)

    def cut(self) -> None:
        """Cut the node off: nothing arrives there, and no connection ends."""
        assert self._agent is not None
        if self._space is not None:
            _ip("-n", self._space, "link", "set", "eth0", "down")
        else:
            self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End all processes of the node."""
        self._signal(signal.SIGKILL)
        if self._agent is not None:
            self._agent.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Signal the agent and its rank, which has a session of its own."""
        if self._agent is None:
            return
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self._agent.pid)
            for each in (agent, *agent.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Make two network namespaces with a link between them.

    Raises:
        OSError: there is no `ip`.
        subprocess.CalledProcessError: this process may not make them.
    """
    first, second = (f"elastic-mbs-{os.getpid()}-{number}" for number in range(2))
    try:
        for space in (first, second):
            _ip("netns", "add", space)
        # made inside, so this machine's own network is left alone
        _ip(
            *("link", "add", "eth0", "netns", first, "type", "veth"),
            *("peer", "name", "eth0", "netns", second),
        )
        for space, address in zip((first, second), ADDRESSES, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
        yield first, second
    finally:
        for space in (first, second):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@contextmanager
def two_nodes(spaces: tuple[str, str] | None = None) -> Iterator[tuple[Node, Node]]:
    """Yield two nodes: in namespaces, or on loopback. All their processes end with the block."""
    nodes = [Node(number, spaces and spaces[number]) for number in range(2)]
    try:
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.kill()
