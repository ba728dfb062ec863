"""Scripts run under the fence: small processes that load no torch."""

import os
import subprocess
import sys
import textwrap
import time

from stress.limits import Fence
from stress.limits import fence as fences

LONG = 600

PREPARE = """
import ctypes, os, signal, struct, sys, threading, time, random
libc = ctypes.CDLL(None)
libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = libc.malloc_usable_size.argtypes = [ctypes.c_void_p]
libc.malloc.restype = ctypes.c_void_p
def take(size, alignment=64):
    block = ctypes.c_void_p()
    return None if libc.posix_memalign(ctypes.byref(block), alignment, size) else block
def own():
    with open(os.environ["ELASTIC_MBS_FENCE"], "rb") as file:
        words = struct.unpack("512q", file.read())
    for place in range(16, 512, 8):
        if words[place] == os.getpid():
            return dict(zip(("live", "peak", "failures"), words[place + 2:]))
    return dict.fromkeys(("live", "peak", "failures"), 0)
def ready():
    print("ready", flush=True)
    return sys.stdin.readline()
"""


def script(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", PREPARE + textwrap.dedent(code)]


def run(fence: Fence, code: str) -> str:
    """Run a script under the fence; a failed assertion in it fails the test."""
    environment = os.environ | fences.environment(fence)
    done = subprocess.run(
        script(code), env=environment, capture_output=True, text=True, check=False, timeout=LONG
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def start(fence: Fence, code: str) -> subprocess.Popen[str]:
    """Start a script under the fence, and wait until it is ready."""
    environment = os.environ | fences.environment(fence)
    process = subprocess.Popen(
        script(code), env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def wait_for_end(pid: int) -> None:
    while fences.start_time(pid) != -1:
        time.sleep(0.001)
