"""A Ray cluster of several nodes on this machine, which asks for a token."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

import psutil
import yaml
from ports import free_port
from waiting import assert_soon

from deployments.cli import SERVE_ENVIRONMENT
from deployments.local.ending import kill_after

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
TOKEN = secrets.token_hex(32)


class Cluster:
    """Ray nodes on this machine; `dashboard` is where the head, process `head`, takes deployments.

    A context manager, after which neither they nor `directory`, where all their files are, is left. With an
    `address` the head is there, and nodes on hosts of their own reach it. All its processes have what is in
    `environment`, too.
    """

    def __init__(self, address=None, environment=()):
        self._address = address
        self._environment = dict(environment)
        self._nodes = []
        self.head = None
        self._gcs, self._dashboard_port = free_port(), free_port()
        self.dashboard = f"http://127.0.0.1:{self._dashboard_port}"

    def __enter__(self) -> Self:
        # Ray's sockets need a short path.
        self._files = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        self.directory = Path(self._files.name)
        return self

    def __exit__(self, *_):
        with self._files:
            processes = [psutil.Process(node.pid) for node in self._nodes if node.poll() is None]
            processes += [child for process in processes for child in process.children(recursive=True)]
            for node in reversed(self._nodes):
                node.terminate()
            kill_after(30, processes)

    def start_head(self, cpus=0):
        """The head, which runs nothing by default, or another in the place of a lost one; its process."""
        at = () if self._address is None else (f"--node-ip-address={self._address}",)
        directory = self.directory / f"head-{len(self._nodes)}"  # as a new host has its own
        self.head = self._start(
            "--head",
            *at,
            f"--port={self._gcs}",
            f"--dashboard-port={self._dashboard_port}",
            f"--temp-dir={directory}",
            f"--num-cpus={cpus}",
            "--labels=slackserve.io/tier=head",
        )
        return self.head

    def add_group(self, group):
        """A node with the labels and the CPUs of a group's pods."""
        (container,) = group["template"]["spec"]["containers"]
        self.add(group["labels"], container["resources"]["limits"]["cpu"])

    def add(self, labels, cpus, host=None):
        """A node, on a host of its own if one is given with its address; its process."""
        given = ",".join(f"{name}={value}" for name, value in labels.items())
        options = [
            f"--address={self._address or '127.0.0.1'}:{self._gcs}",
            f"--num-cpus={cpus}",
            f"--labels={given}",
        ]
        if host is None:
            return self._start(*options)
        namespace, address = host
        within = ("ip", "netns", "exec", namespace, "nice", "-n19")
        node = self._start(*options, f"--node-ip-address={address}", within=within)
        # A head that starts has 15 s for it, of cores that are all hosts': it goes before what computes.
        # Where Linux shares cores out by session, how nice a process is does not matter.
        with contextlib.suppress(FileNotFoundError):
            Path(f"/proc/{node.pid}/autogroup").write_text("19")
        return node

    def _start(self, *options, within=()):
        ports = [
            f"--{name}={free_port()}"
            for name in ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
        ]
        command = [*within, BIN / "ray", "start", "--block", "--disable-usage-stats", *ports, *options]
        path = self.directory / f"node-{len(self._nodes)}.log"
        with path.open("wb") as log:
            # Ray puts the directory in which it starts before all others that are searched for code.
            node = subprocess.Popen(
                command,
                cwd=self.directory,
                env=environment() | self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._nodes.append(node)
        # One after the other: nodes that start at once on one machine take the same names for their sockets.
        assert_soon(lambda: "Ray runtime started" in path.read_text() or node.poll() is not None, 60)
        assert node.poll() is None, path.read_text()
        return psutil.Process(node.pid)

    def get(self, path):
        """What its dashboard answers; None when it does not."""
        request = urllib.request.Request(
            f"{self.dashboard}{path}", headers={"authorization": f"Bearer {TOKEN}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return yaml.safe_load(answer.read())
        except (urllib.error.URLError, OSError):
            return None

    def application(self):
        """What Serve says of the one application; None when it says nothing."""
        answer = self.get("/api/serve/applications/") or {}
        return next(iter(answer.get("applications", {}).values()), None)

    def is_serving(self):
        """Whether all of the application is as it was asked for."""
        application = self.application()
        return (
            application is not None
            and application["status"] == "RUNNING"
            and all(each["status"] == "HEALTHY" for each in application["deployments"].values())
        )

    def running(self, deployment):
        """The replicas of a deployment that run."""
        replicas = self.application()["deployments"][deployment]["replicas"]
        return {one["replica_id"] for one in replicas if one["state"] == "RUNNING"}

    def pid(self, replica):
        """The process of a replica, by Serve's id of it."""
        found = self.get("/api/v0/actors?detail=1&limit=1000")["data"]["result"]["result"]
        (pid,) = [one["pid"] for one in found if one["name"].endswith(replica) and one["state"] == "ALIVE"]
        return pid

    def node_id(self, **labels):
        """Ray's id of the one node that lives with these labels."""
        found = self.get("/api/v0/nodes?detail=1&limit=100")["data"]["result"]["result"]
        alive = [one for one in found if one["state"] == "ALIVE" and labels.items() <= one["labels"].items()]
        (node,) = alive
        return node["node_id"]

    def leave(self, node_id, within_s):
        """Run `slackserve leave`; the process that has ended."""
        command = [BIN / "slackserve", "leave", "--node-id", node_id, "--within", str(within_s)]
        given = environment() | {"RAY_ADDRESS": f"{self._address or '127.0.0.1'}:{self._gcs}"}
        return subprocess.run(command, env=given, capture_output=True, text=True, check=False)

    def monitors(self):
        """The names of the SLO monitors that live."""
        found = self.get("/api/v0/actors?detail=1&limit=1000")
        actors = [] if found is None else found["data"]["result"]["result"]
        return {
            one["name"] for one in actors if one["class_name"] == "SloMonitor" and one["state"] == "ALIVE"
        }

    def deploy(self, config, token=TOKEN):
        """Run `serve deploy`; the process that has ended."""
        path = self.directory / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        return subprocess.run(
            [BIN / "serve", "deploy", str(path), "--address", self.dashboard],
            env=environment(token),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def environment(token=TOKEN):
    """Of all its processes."""
    given = os.environ | SERVE_ENVIRONMENT | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token"}
    given.pop("RAY_ADDRESS", None)
    return given | {"RAY_AUTH_TOKEN": token}
