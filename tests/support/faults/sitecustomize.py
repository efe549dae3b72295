"""Faults inside a deployment's processes, of which nothing outside can make one in sixteen happen.

Python imports this at the start of each process that has the folder on its path. What shall fail is read from
the file that `SLACKSERVE_TEST_FAULTS` names, at every step of a decode engine: a JSON object with

- `wrong_peer_every`: so many pulls until one goes to a peer that has another name by now, and is refused;
- `hold_pulls`: whether pulls wait.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path

_MODULE = "kv_transfer.connector"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the connector, and has it loaded with faults."""

    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _make_faulty(module.NixlConnector)

        spec.loader.exec_module = exec_module
        return spec


def _make_faulty(connector):
    start_load = connector.start_load_kv
    held, pulls = {}, 0

    def start_load_kv(self, forward_context, **options):
        nonlocal pulls
        faults = json.loads(Path(os.environ["SLACKSERVE_TEST_FAULTS"]).read_text() or "{}")
        wanted = self._connector_metadata.reqs_to_recv
        held.update(wanted)
        wanted.clear()
        if not faults.get("hold_pulls"):
            wanted.update(held)
            held.clear()
        for pull in wanted.values():
            pulls += 1
            if (every := faults.get("wrong_peer_every")) and pulls % every == 0:
                pull.remote.engine_id = f"somebody-else-{os.getpid()}-{pulls}"
        start_load(self, forward_context, **options)

    connector.start_load_kv = start_load_kv


if "SLACKSERVE_TEST_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Finder())
